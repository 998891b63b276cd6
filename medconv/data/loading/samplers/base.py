"""What every sampler is: from (seed, sample number) to a case, and to the corner of a patch in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from medconv.data.case import Case
from medconv.data.loading.patch_shape import PatchShape
from medconv.data.loading.samplers.case_rounds import CaseRounds
from medconv.data.loading.samplers.corners import foreground_corner
from medconv.data.preprocessing.store import Entry
from medconv.data.random_streams import RandomStream, generator

ClassIndices = Sequence[Sequence[int]]


@dataclass(frozen=True)
class TrainingCases:
    """The cases to draw from.

    Args:
        cases: a sampler names them by their index here.
        patch: None for whole images with values.
        class_indices: called without arguments, returns the indices of the cases of each class: of
            image-level classes, or of the label values 1, 2, ... Only for those who need it: it reads the
            foreground of every case.
    """

    cases: Sequence[Case]
    patch: PatchShape | None
    class_indices: Callable[[], ClassIndices]

    @property
    def weights(self) -> np.ndarray | None:
        """The weight of each case, shape (cases,); None if all are alike."""
        weights = [case.weight for case in self.cases]
        return None if len(set(weights)) == 1 else np.array(weights)


class Sampler:
    """Cases in random order, by their weights where these differ; patches anywhere in the image.

    Every result depends on (seed, sample number) alone, so that loader workers, devices and restarts do not
    change what is trained on: draw random numbers by `medconv.data.random_streams.generator`. A subclass
    changes `case_index`, `corner` or both; whole images with values need `case_index` alone.

    Args:
        cases: not kept, since each loader worker gets a copy of the sampler.
    """

    foreground_share: float = 0.0  # of patches that are centred on foreground
    balances_classes: ClassVar[bool] = False  # whether each class is drawn equally often

    def __init__(self, cases: TrainingCases) -> None:
        self.num_cases = len(cases.cases)
        self.weights = cases.weights
        self.box = cases.patch.box if cases.patch is not None else ()
        self._rounds = CaseRounds(self.num_cases, self.weights)
        # By case index, where a case lacks labels: the label values that it annotates.
        self._annotated_values = {
            index: case.annotated for index, case in enumerate(cases.cases) if case.annotated is not None
        }

    def case_index(self, seed: int, sample: int) -> int:
        """The case of a sample, in 0 ... num_cases - 1; reads no file."""
        return self._rounds.index(seed, sample)

    def corner(self, seed: int, sample: int, entry: Entry) -> np.ndarray:
        """First voxel of a sample's patch along each axis of the image; negative where it is padded.

        Args:
            entry: of the case that `case_index` gives; read few voxels of it, since it is memory-mapped.
        """
        return foreground_corner(
            generator(seed, RandomStream.PATCH_POSITION, sample),
            entry,
            self.box,
            self.foreground_share,
            self._annotated_values.get(self.case_index(seed, sample)),
        )


def checked_share(foreground_share: float) -> float:
    """Raises: ValueError: not between 0 and 1."""
    if not 0 <= foreground_share <= 1:
        raise ValueError(f"foreground_share must lie between 0 and 1, got {foreground_share}")
    return foreground_share
