"""One label map from those of several raters: by majority, or by STAPLE; and the shares of the raters."""

from collections.abc import Callable, Sequence

import numpy as np

_MAX_ROUNDS = 100  # of STAPLE
_CONVERGED = 1e-6  # largest change of a rater's probabilities


def shares(label_maps: Sequence[np.ndarray] | np.ndarray, num_classes: int) -> np.ndarray:
    """The share of the raters that gave each class to a voxel.

    Shape: each (*spatial) -> (num_classes - 1, *spatial) float32, without the background.
    """
    votes = np.zeros((num_classes - 1, *label_maps[0].shape), np.float32)
    for label_map in label_maps:
        for index, share in enumerate(votes, start=1):
            share += label_map == index
    return votes / np.float32(len(label_maps))


def most_probable(foreground: np.ndarray) -> np.ndarray:
    """The class with the largest probability; the background has the rest, and the lowest of equals wins.

    Shape: (foreground classes, *spatial) -> (*spatial) int16.
    """
    label = np.zeros(foreground.shape[1:], np.int16)
    largest = 1 - foreground.sum(0)
    for index, probability in enumerate(foreground, start=1):
        # Shares such as 1/3 are rounded, so equals may differ in the last bit.
        wins = probability > largest + 1e-6
        label[wins] = index
        largest[wins] = probability[wins]
    return label


def majority(label_maps: Sequence[np.ndarray]) -> np.ndarray:
    """The label that most raters gave to a voxel; the lowest of equals, so the background of two raters.

    Shape: each (*spatial) -> (*spatial) int16.
    """
    # the background first, also where no voxel has it
    values = np.unique(np.concatenate([[0], *map(np.unique, label_maps)]))
    votes, vote_of_voxel, _ = _different_votes(label_maps, values)
    winners = values[most_probable(shares(votes, len(values)))].astype(np.int16)
    consensus: np.ndarray = winners[vote_of_voxel].reshape(label_maps[0].shape)
    return consensus


def staple(label_maps: Sequence[np.ndarray]) -> np.ndarray:
    """The most probable label where each rater confuses classes with probabilities that are estimated, too.

    Shape: each (*spatial) -> (*spatial) int16.
    Source: Warfield et al. 2004, doi:10.1109/TMI.2004.828354, for several classes; begins with the votes, as
        Rohlfing et al. 2004, doi:10.1109/TMI.2004.830803. Priors are the frequencies over all raters.
    """
    values = np.unique(np.concatenate([np.unique(label_map) for label_map in label_maps]))
    votes, vote_of_voxel, counts = _different_votes(label_maps, values)
    # How often any rater gave a class, over all voxels
    prior = np.sum([np.bincount(of_rater, counts, len(values)) for of_rater in votes], axis=0)
    prior /= prior.sum()
    # Expectation maximisation begins with the shares of the votes
    weights = np.zeros((votes.shape[1], len(values)))
    for of_rater in votes:
        weights[np.arange(len(of_rater)), of_rater] += 1 / len(votes)
    performance = _performance(votes, weights, counts)
    for _ in range(_MAX_ROUNDS):
        weights = _weights(votes, performance, prior)
        updated = _performance(votes, weights, counts)
        has_converged = np.abs(updated - performance).max() < _CONVERGED
        performance = updated
        if has_converged:
            break
    labels: np.ndarray = values[weights.argmax(1)].astype(np.int16)
    consensus: np.ndarray = labels[vote_of_voxel].reshape(label_maps[0].shape)
    return consensus


CONSENSUS: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {"majority": majority, "staple": staple}


def _different_votes(
    label_maps: Sequence[np.ndarray], values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Voxels with the same votes have the same answer, and there are few different votes.

    Returns:
        The votes as indices of `values`, (raters, votes); the vote of each voxel; and its number of voxels.
    """
    digits = [np.searchsorted(values, label_map.ravel()) for label_map in label_maps]
    codes = np.zeros(digits[0].size, np.int64)
    num_codes = 1
    for digit in digits:
        if num_codes > np.iinfo(np.int64).max // len(values):  # far fewer of them occur
            occurring, codes = np.unique(codes, return_inverse=True)
            num_codes = len(occurring)
        codes = codes * len(values) + digit
        num_codes *= len(values)
    _, first_voxel, vote_of_voxel, counts = np.unique(
        codes, return_index=True, return_inverse=True, return_counts=True
    )
    return np.stack([digit[first_voxel] for digit in digits]), vote_of_voxel, counts


def _performance(votes: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The probability with which each rater gives a label where another one is true.

    Shape: votes (raters, votes), weights (votes, classes), counts (votes,) -> (raters, classes that are true,
        classes that are given).
    """
    num_classes = weights.shape[1]
    voxels = weights * counts[:, None]
    joint = np.zeros((len(votes), num_classes, num_classes))  # the class that is given comes first
    for of_rater, given in zip(joint, votes, strict=True):
        np.add.at(of_rater, given, voxels)
    return _shares_of_sum(joint.swapaxes(1, 2), axis=2)


def _weights(votes: np.ndarray, performance: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """The probability of each true class. Shape: as of `_performance` -> (votes, classes)."""
    likelihood = np.tile(prior, (votes.shape[1], 1))
    # raters are independent given the truth, so their probabilities multiply
    for of_rater, given in zip(performance, votes, strict=True):
        likelihood *= of_rater.T[given]
    return _shares_of_sum(likelihood, axis=1)


def _shares_of_sum(values: np.ndarray, axis: int) -> np.ndarray:
    """Values whose sum along the axis is 1, or 0 where it was 0."""
    total = values.sum(axis, keepdims=True)
    shares_of_sum: np.ndarray = np.divide(values, total, out=np.zeros_like(values), where=total > 0)
    return shares_of_sum
