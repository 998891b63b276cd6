"""Each class equally often: of label maps at the centre of patches, of image-level classes as samples."""

import logging
from collections.abc import Sequence

import numpy as np

from medconv.data import splits
from medconv.data.case import Case
from medconv.data.loading.samplers.base import Sampler, TrainingCases, checked_share
from medconv.data.loading.samplers.case_rounds import CaseRounds
from medconv.data.loading.samplers.corners import foreground_corner
from medconv.data.preprocessing.store import Entry, Store
from medconv.data.random_streams import RandomStream, generator
from medconv.targets import Targets

log = logging.getLogger(__name__)


def balanced(cases: TrainingCases, foreground_share: float) -> Sampler:
    """The balanced sampler of label maps or of image-level classes.

    Args:
        foreground_share: of patches; whole images have none.
    Raises:
        ValueError: a share that is not between 0 and 1, or targets without classes.
    """
    if cases.patch is None:
        return BalancedImageSampler(cases)
    return BalancedPatchSampler(cases, foreground_share)


class BalancedPatchSampler(Sampler):
    """Draws first the class, each equally often, then a case that has it, by weight, then a voxel of it.

    The others than this `foreground_share` of patches are drawn as by `Sampler`.
    """

    balances_classes = True

    def __init__(self, cases: TrainingCases, foreground_share: float) -> None:
        super().__init__(cases)
        self.foreground_share = checked_share(foreground_share)
        # Label value and indices of its cases, for classes that occur.
        self._cases_of_class = [
            (label_value, np.array(indices))
            for label_value, indices in enumerate(cases.class_indices(), start=1)
            if len(indices) > 0
        ]

    def case_index(self, seed: int, sample: int) -> int:
        case_index, _ = self.draw(seed, sample)
        return case_index

    def corner(self, seed: int, sample: int, entry: Entry) -> np.ndarray:
        if not self._cases_of_class:
            return super().corner(seed, sample, entry)
        _, label_value = self.draw(seed, sample)
        rng = generator(seed, RandomStream.PATCH_POSITION, sample)
        if label_value is None:
            return foreground_corner(rng, entry, self.box, foreground_share=0.0)
        return foreground_corner(rng, entry, self.box, foreground_share=1.0, label_values=[label_value])

    def draw(self, seed: int, sample: int) -> tuple[int, int | None]:
        """Index of the case, and the label value at the patch's centre; None: anywhere."""
        if not self._cases_of_class:
            return super().case_index(seed, sample), None
        rng = generator(seed, RandomStream.PATCH_CLASS, sample)
        if rng.random() >= self.foreground_share:
            return super().case_index(seed, sample), None
        label_value, indices = self._cases_of_class[rng.integers(len(self._cases_of_class))]
        probabilities = None
        if self.weights is not None:
            probabilities = self.weights[indices] / self.weights[indices].sum()
        return int(rng.choice(indices, p=probabilities)), label_value


class BalancedImageSampler(Sampler):
    """Classes take turns, in a new random order each round; so do the cases of each class, by weight."""

    balances_classes = True

    def __init__(self, cases: TrainingCases) -> None:
        super().__init__(cases)
        self._indices = [np.array(indices) for indices in cases.class_indices() if len(indices) > 0]
        self._class_rounds = CaseRounds(len(self._indices), class_number=len(self._indices))
        self._case_rounds = [self._rounds_of(number) for number in range(len(self._indices))]

    def _rounds_of(self, class_number: int) -> CaseRounds:
        indices = self._indices[class_number]
        weights = None if self.weights is None else self.weights[indices]
        # The first class takes the random numbers of all cases, as it always has: seeded runs stay the same.
        return CaseRounds(len(indices), weights, class_number or None)

    def case_index(self, seed: int, sample: int) -> int:
        num_classes = len(self._indices)
        if num_classes == 1:
            return int(self._indices[0][self._case_rounds[0].index(seed, sample)])
        class_number = self._class_rounds.index(seed, sample)
        # Each class comes once a round, so the round's number is the number of its sample, too.
        sample_of_class = sample // num_classes
        position = self._case_rounds[class_number].index(seed, sample_of_class)
        return int(self._indices[class_number][position])


def class_indices(
    cases: Sequence[Case], targets: Targets, class_names: Sequence[str], store: Store
) -> list[list[int]]:
    """Indices of the cases of each class; of label maps, of those with an annotated voxel of it.

    Args:
        class_names: of the label values 0, 1, ...; image-level targets know theirs.
    Raises:
        ValueError: image-level targets without classes.
    """
    if not targets.per_voxel:
        return [group.tolist() for group in targets.balanced_groups(splits.values_of(cases))]
    values_of_case = [_annotated_values(case, store) for case in cases]
    indices_of_class = [
        [index for index, values in enumerate(values_of_case) if label_value in values]
        for label_value in range(1, len(class_names))
    ]
    num_cases = dict(zip(class_names[1:], map(len, indices_of_class), strict=True))
    log.info(
        "data: patches draw each class equally often; of %d training cases: %s",
        len(cases),
        ", ".join(f"{name} in {count}" for name, count in num_cases.items()),
    )
    for name, count in num_cases.items():
        if count == 0:
            log.warning("balanced sampling: no training case has a voxel of %s after preprocessing", name)
    return indices_of_class


def _annotated_values(case: Case, store: Store) -> set[int]:
    """The label values that a prepared case has and annotates."""
    values = set(store.read(case.id).foreground[:, 0].tolist())
    if case.annotated is not None:
        values &= set(case.annotated)
    return values
