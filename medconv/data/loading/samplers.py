"""Samplers: which case training sample n shows, and where its patch lies; `conf/sampler/` has the options.

A corner, the first voxel of a patch along each axis, is negative where the image is smaller than the patch,
which is then padded on both sides.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from medconv.data.case import Case
from medconv.data.loading.patch import PatchShape
from medconv.data.preprocessing.preprocess import Entry
from medconv.data.preprocessing.store import Store
from medconv.data.random_streams import RandomStream, generator

ClassIndices = Sequence[Sequence[int]]

log = logging.getLogger(__name__)


class CaseRounds:
    """An endless sequence of indices; element n depends on (seed, n) alone. It is shuffled anew in each round
    of all cases, and goes on over epochs, whose length is another one (`data.samples_per_epoch`).

    Args:
        seed: of the run.
        count: of cases, or of whatever else takes turns.
        weights: how often each comes over all rounds, relative to the others, shape (count,); in each round
            at most one time more or less. None: all equally often.
        class_number: a sequence of its own for this class; None: that of all cases.
    """

    def __init__(
        self, seed: int, count: int, weights: np.ndarray | None = None, class_number: int | None = None
    ) -> None:
        self.seed = seed
        self.count = count
        self.weights = weights
        self.class_number = class_number
        # The order of the latest round: neighbouring samples share it.
        self._round = -1
        self._order = np.empty(0, np.int64)

    def index(self, number: int) -> int:
        """Element `number` of the sequence, in 0 ... count - 1."""
        round_number, position = divmod(number, self.count)
        if self._round != round_number:
            if self.class_number is None:
                rng = generator(self.seed, RandomStream.CASE_ORDER, round_number)
            else:
                rng = generator(self.seed, RandomStream.BALANCED_ORDER, round_number, self.class_number)
            order = rng.permutation(self.count)
            if self.weights is not None:
                # Systematic resampling: one random offset, then equal steps through the cumulative weights
                steps = (rng.random() + np.arange(self.count)) / self.count
                cumulative = np.cumsum(self.weights) / np.sum(self.weights)
                drawn = np.searchsorted(cumulative, steps, side="right")
                # The last cumulative weight may be just below 1 by rounding
                order = drawn.clip(max=self.count - 1)[order]
            self._order = order
            self._round = round_number
        return int(self._order[position])


def corner_around(
    voxel: Sequence[int] | np.ndarray, image_shape: Sequence[int], box: Sequence[int]
) -> np.ndarray:
    """The corner of the patch with this voxel at its centre, moved as far as needed to lie inside the image.

    Args:
        box: of the patch, voxels; the centre of an even number is the voxel behind its middle.
    """
    margin = np.subtract(image_shape, box)
    corner = np.subtract(voxel, np.floor_divide(box, 2))
    inside = np.clip(corner, 0, np.maximum(margin, 0))
    return np.where(margin > 0, inside, margin // 2)  # half of the padding on each side


def foreground_corner(
    rng: np.random.Generator,
    entry: Entry,
    box: Sequence[int],
    foreground_share: float,
    label_values: Sequence[int] | None = None,
) -> np.ndarray:
    """The corner of a patch that is centred on foreground in this share of calls, and lies anywhere else.

    Where a dataset has a value to ignore, `anywhere` is centred on a labelled voxel.
    Args:
        entry: the prepared case; its foreground is read, its image is not.
        foreground_share: 0 to 1.
        label_values: the classes to centre on, each equally often; None: all classes of the case.
    """
    image_shape = entry.label.shape
    # Anywhere: every corner inside the image is equally likely; half of the padding on each side, else.
    # Drawn even if it is not used: the numbers after it, and with them all seeded runs, stay the same.
    margin = np.subtract(image_shape, box)
    anywhere = np.where(margin > 0, rng.integers(0, np.maximum(margin, 0) + 1), margin // 2)
    # Rows of class 0 come first, if there are any: labelled voxels of any class, see `Entry`.
    rows = entry.foreground
    has_labelled = len(rows) > 0 and rows[0, 0] == 0
    first_foreground = np.searchsorted(rows[:, 0], 1) if has_labelled else 0
    labelled = rows[:first_foreground]
    foreground = rows[first_foreground:]
    if label_values is not None:
        foreground = foreground[np.isin(foreground[:, 0], label_values)]
    on_foreground = len(foreground) > 0 and rng.random() < foreground_share
    candidates = foreground if on_foreground else labelled
    if len(candidates) == 0:
        return anywhere
    return corner_around(foreground_voxel(candidates, rng), image_shape, box)


def foreground_voxel(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The position of a random voxel of a random class. Shape: (voxels, 1 + axes) -> (axes,).

    Args:
        rows: class and position, sorted by class. A binary search reads only a few of them.
    """
    first_class = int(rows[0, 0])
    last_class = int(rows[-1, 0])
    # Class c is in rows bounds[c - first_class] ... bounds[c - first_class + 1] - 1.
    bounds = np.searchsorted(rows[:, 0], np.arange(first_class, last_class + 2))
    present = np.flatnonzero(np.diff(bounds))
    chosen = present[rng.integers(len(present))]
    row = rng.integers(bounds[chosen], bounds[chosen + 1])
    return np.asarray(rows[row, 1:])


class WholeImages(Protocol):
    """How samples are made where they are whole images with values, not patches with label maps: a module
    that a family of targets names (`Family.whole_images`).

    Args:
        Images: a `data.loading.samples.Samples`.
        BalancedImageSampler: draws each class equally often.
        class_indices: (cases, targets) -> indices of the cases of each class.
        samples_per_epoch: (number of training cases) -> samples, where the config sets no number.
        check: (split, dataset, measured, data): raises an error where images and values are no samples.
    """

    Images: Callable[..., Any]
    BalancedImageSampler: Callable[["TrainingCases"], "Sampler"]
    class_indices: Callable[..., ClassIndices]
    samples_per_epoch: Callable[[int], int]
    check: Callable[..., None]


@dataclass(frozen=True)
class TrainingCases:
    """The cases to draw from.

    Args:
        cases: a sampler names them by their index here.
        patch: not used for whole images with values.
        class_indices: called without arguments, returns the indices of the cases of each class: of the label
            values 1, 2, ..., or of classes of whole images. Only for those who need it: it reads the
            foreground of every case.
        seed: of the run.
        whole_images: where samples are whole images with values; None: patches with label maps.
    """

    cases: Sequence[Case]
    patch: PatchShape
    class_indices: Callable[[], ClassIndices]
    seed: int
    whole_images: WholeImages | None = None


class Sampler:
    """Cases in random order, by their weights where these differ; patches anywhere in the image.

    Every result depends on `seed` and the sample's number alone, so that loader workers, devices and restarts
    do not change what is trained on: draw random numbers by `medconv.data.random_streams.generator`. A
    subclass changes `case_index`, `corner` or both; whole images with values need `case_index` alone.

    Args:
        cases: not kept, since each loader worker gets a copy of the sampler.
    """

    foreground_share: float = 0.0  # of patches that are centred on foreground
    balances_classes: ClassVar[bool] = False  # whether each class is drawn equally often

    def __init__(self, cases: TrainingCases) -> None:
        self.seed = cases.seed
        self.num_cases = len(cases.cases)
        weights = [case.weight for case in cases.cases]
        # Shape (cases,); None: all are alike
        self.weights = None if len(set(weights)) == 1 else np.array(weights)
        self.box = cases.patch.box
        self._rounds = CaseRounds(self.seed, self.num_cases, self.weights)
        # By case index, where a case lacks labels: the label values that it annotates.
        self._annotated_values = {
            index: case.annotated for index, case in enumerate(cases.cases) if case.annotated is not None
        }

    def case_index(self, sample: int) -> int:
        """The case of a sample, in 0 ... num_cases - 1; reads no file."""
        return self._rounds.index(sample)

    def corner(self, sample: int, entry: Entry) -> np.ndarray:
        """First voxel of a sample's patch along each axis of the image; negative where it is padded.

        Args:
            entry: of the case that `case_index` gives; read few voxels of it, since it is memory-mapped.
        """
        return foreground_corner(
            generator(self.seed, RandomStream.PATCH_POSITION, sample),
            entry,
            self.box,
            self.foreground_share,
            self._annotated_values.get(self.case_index(sample)),
        )


class ForegroundSampler(Sampler):
    """Each round has each case once, or as often as its weight says; then the patch is placed.

    Args:
        foreground_share: of patches that are centred on a voxel of a random class of the case, 0 to 1; drawn
            for each sample, so a batch may have more or fewer (nnU-Net fixes their number in each batch). The
            others lie anywhere, or with a value to ignore are centred on a labelled voxel.
        by_weight: draw cases by their weights; None: where the weights differ.
    Raises:
        ValueError: a share that is none, or `by_weight` that contradicts the weights.
    """

    def __init__(self, cases: TrainingCases, foreground_share: float, by_weight: bool | None = None) -> None:
        super().__init__(cases)
        if not 0 <= foreground_share <= 1:
            raise ValueError(f"foreground_share must lie between 0 and 1, got {foreground_share}")
        self.foreground_share = foreground_share
        if by_weight and self.weights is None:
            weight = cases.cases[0].weight
            raise ValueError(
                f"by_weight=true needs case weights that differ, but all {self.num_cases} cases have "
                f"weight {weight:g}"
            )
        if by_weight is False and self.weights is not None:
            raise ValueError(
                "by_weight=false draws each case equally often, but cases have weights from "
                f"{self.weights.min():g} to {self.weights.max():g}; by_weight=true draws by them"
            )


def balanced(cases: TrainingCases, foreground_share: float) -> Sampler:
    """The balanced sampler of label maps or of classes of whole images.

    Args:
        foreground_share: of patches; whole images have none.
    Raises:
        ValueError: a share that is not between 0 and 1, or targets without classes.
    """
    if cases.whole_images is not None:
        return cases.whole_images.BalancedImageSampler(cases)
    return BalancedPatchSampler(cases, foreground_share)


class BalancedPatchSampler(ForegroundSampler):
    """Draws first the class, each equally often, then a case that has it, by weight, then a voxel of it.

    The others than this `foreground_share` of patches are drawn as by `Sampler`.
    """

    balances_classes = True

    def __init__(self, cases: TrainingCases, foreground_share: float) -> None:
        super().__init__(cases, foreground_share)
        # Label value and indices of its cases, for classes that occur.
        self._cases_of_class = [
            (label_value, np.array(indices))
            for label_value, indices in enumerate(cases.class_indices(), start=1)
            if len(indices) > 0
        ]

    def case_index(self, sample: int) -> int:
        case_index, _ = self.draw(sample)
        return case_index

    def corner(self, sample: int, entry: Entry) -> np.ndarray:
        if not self._cases_of_class:
            return super().corner(sample, entry)
        _, label_value = self.draw(sample)
        rng = generator(self.seed, RandomStream.PATCH_POSITION, sample)
        if label_value is None:
            return foreground_corner(rng, entry, self.box, foreground_share=0.0)
        return foreground_corner(rng, entry, self.box, foreground_share=1.0, label_values=[label_value])

    def draw(self, sample: int) -> tuple[int, int | None]:
        """Index of the case, and the label value at the patch's centre; None: anywhere."""
        if not self._cases_of_class:
            return super().case_index(sample), None
        rng = generator(self.seed, RandomStream.PATCH_CLASS, sample)
        if rng.random() >= self.foreground_share:
            return super().case_index(sample), None
        label_value, indices = self._cases_of_class[rng.integers(len(self._cases_of_class))]
        probabilities = None
        if self.weights is not None:
            probabilities = self.weights[indices] / self.weights[indices].sum()
        return int(rng.choice(indices, p=probabilities)), label_value


def class_indices(cases: Sequence[Case], class_names: Sequence[str], store: Store) -> list[list[int]]:
    """Indices of the cases of each foreground class: of those with an annotated voxel of it.

    Args:
        class_names: of the label values 0, 1, ...
    """
    values_of_case = [_annotated_values(case, store) for case in cases]
    indices_of_class = [
        [index for index, values in enumerate(values_of_case) if label_value in values]
        for label_value in range(1, len(class_names))
    ]
    num_cases = dict(zip(class_names[1:], map(len, indices_of_class), strict=True))
    log.info(
        "data: patches draw each class equally often; training cases with it, of %d: %s",
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
