"""What features add to predictions by options of `medconv predict`: files beside them, other label maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.case import Case, Grid
from medconv.inference.slab_answer import Group, SlabAnswer


class Extra:
    """What one option adds. The methods are called in the order in which they stand here; none is needed.

    Attributes:
        flag: the option, for messages.
        per_voxel: whether it is for networks that predict label maps; else for those of whole images.
        needs_logits: whether `answer` gives something; logits are then summed in fp32, of each network apart.
    """

    flag: ClassVar[str]
    per_voxel: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = False

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        """Once, before the first case. Raises: ValueError: it does not fit the networks, or the images."""

    def settings(self) -> dict[str, Any]:
        """What distinguishes predictions with it, by name: others do not count as done."""
        return {}

    def answer(self, groups: Sequence[Group], targets: Any) -> SlabAnswer:
        """What collects the answer for a case of these groups, which `write` finds in the scores."""
        raise NotImplementedError

    def finish(self, label: np.ndarray, grid: Grid, targets: Any) -> np.ndarray:
        """Post-processing. Shape: label (X, Y, Z); it is not changed."""
        return label

    def write(self, folder: Path, predictor: Any, case: Case, scores: Any, answer: np.ndarray) -> None:
        """Write the files of a case below the output folder, each in one of the option's `folders`.

        Args:
            scores: as `Predictor.scores` gives them.
            answer: the finished label map, or the outputs of whole images.
        """
