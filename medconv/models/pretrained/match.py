"""Whose name in a file is whose in a network: found from all names together, not from a list of known
prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

COUNTER = "num_batches_tracked"  # of batch norms; says nothing of a network


@dataclass(frozen=True)
class Match:
    """How names in a file follow from a network's own: another beginning, the same end.

    Args: before: what they begin with in the file, such as `state_dict.module.`. own: what the network's
        begin with there, such as `encoder.` where the file is of an encoder alone. Both may be empty.
    """

    before: str
    own: str

    def name(self, own: str) -> str | None:
        """In the file, whether it is there or not; None: of a part of the network that the file is not of."""
        return self.before + own.removeprefix(self.own) if own.startswith(self.own) else None


def matched(theirs: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Match | None:
    """The beginnings that let the most tensors of a network have a namesake with as many outputs in the file.

    So `module.` of DataParallel, `network.` of Lightning, `state_dict`, `model` or any other wrapping is
    found, and so is an encoder within a larger network. Of two that are as good the one that comes first in
    the file counts.
    Returns: None: no tensor has a namesake.
    """
    ends: dict[str, list[str]] = {}  # of names in the file, at any dot, to what stands before
    for name in theirs:
        parts = name.split(".")
        for cut in range(len(parts)):
            ends.setdefault(".".join(parts[cut:]), []).append("".join(f"{part}." for part in parts[:cut]))
    votes: Counter[Match] = Counter()
    for prefix in _wrappers(own):
        for name, value in own.items():
            if name.startswith(prefix) and not name.endswith(COUNTER):
                end = name.removeprefix(prefix)
                for before in ends.get(end, ()):
                    votes[Match(before, prefix)] += theirs[before + end].shape[:1] == value.shape[:1]
    best = max(votes, key=lambda match: votes[match], default=None)
    return best if best is not None and votes[best] else None


def _wrappers(own: Mapping[str, Tensor]) -> Iterator[str]:
    """Beginnings that at least half of a network's names share: with fewer, chance finds namesakes
    anywhere.
    """
    counts: Counter[str] = Counter()
    for name in own:
        parts = name.split(".")
        counts.update("".join(f"{part}." for part in parts[:cut]) for cut in range(len(parts)))
    yield from (prefix for prefix, count in counts.items() if 2 * count >= len(own))
