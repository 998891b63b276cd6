"""Rounds of cases: each case once in a random order, then again in another order, without an end."""

import numpy as np

from medconv.data.random_streams import RandomStream, generator


class CaseRounds:
    """An endless sequence of indices; element n depends on (seed, n) alone.

    Args:
        count: of cases, or of whatever else takes turns.
        weights: how often each comes, relative to the others, shape (count,); None: all equally often.
        class_number: a sequence of its own for this class; None: that of all cases.
    """

    def __init__(
        self, count: int, weights: np.ndarray | None = None, class_number: int | None = None
    ) -> None:
        self.count = count
        self.weights = weights
        self.class_number = class_number
        # The order of the latest round: neighbouring samples share it.
        self._round = (-1, -1)
        self._order = np.empty(0, np.int64)

    def index(self, seed: int, number: int) -> int:
        """Element `number` of the sequence, in 0 ... count - 1."""
        round_number, position = divmod(number, self.count)
        if self._round != (seed, round_number):
            self._order = shuffled(self._generator(seed, round_number), self.count, self.weights)
            self._round = (seed, round_number)
        return int(self._order[position])

    def _generator(self, seed: int, round_number: int) -> np.random.Generator:
        if self.class_number is None:
            return generator(seed, RandomStream.CASE_ORDER, round_number)
        return generator(seed, RandomStream.BALANCED_ORDER, round_number, self.class_number)


def shuffled(rng: np.random.Generator, count: int, weights: np.ndarray | None) -> np.ndarray:
    """One round: `count` indices in random order.

    With weights, a case comes as often over all rounds as its weight says, and in each round at most one time
    more or less (systematic resampling).
    """
    order = rng.permutation(count)
    if weights is None:
        return order
    # One random offset, then equal steps through the cumulative weights.
    steps = (rng.random() + np.arange(count)) / count
    cumulative = np.cumsum(weights) / np.sum(weights)
    drawn = np.searchsorted(cumulative, steps, side="right")
    # The last cumulative weight may be just below 1 by rounding.
    return drawn.clip(max=count - 1)[order]
