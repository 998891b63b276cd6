"""Label maps that several raters drew, or that are probabilities: the network learns the probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.ndimage import find_objects
from torch import Tensor
from torch.nn import functional as F

from medconv.data.case import Dataset
from medconv.features.raters.calibration import brier, calibration_error
from medconv.features.raters.labels import labelled
from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import ClassScores
from medconv.targets.base import Family
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.scores import DiceScores, NamedScore, ValidatedCase
from medconv.targets.segmentation import over_voxels

_BY_CLASS = ("dice", "brier", "calibration_error")  # in a row, a list each


@dataclass(frozen=True)
class SoftTargets(LabelMapTargets):
    """Exclusive classes whose labels are probabilities, such as the mean of several raters.

    A batch's label is (batch, classes, *spatial), floating-point, without the background, which has the rest.
    A row of a checkpoint's `validation` has lists: `dice`, `brier` and `calibration_error` of each class, and
    `rater_dice`, the mean Dice against each rater. Dice is that of label maps, against the consensus: the
    most probable class. Brier score and calibration error compare probabilities on the preprocessed grid, in
    the box around the foreground of prediction and reference.
    """

    family: ClassVar[Family] = Family(labels="medconv.features.raters.labels")
    kind: ClassVar[str] = "soft"
    default_loss: ClassVar[str] = "soft_dice_ce"
    scores_probabilities: ClassVar[bool] = True

    @classmethod
    def with_soft_labels(
        cls,
        dataset: Dataset,
        raters: str | Sequence[str] | None,
        soft_labels: bool | None,
        root: str | None = None,
    ) -> Dataset:
        """The dataset whose labels are probabilities.

        Args:
            dataset: with label maps of exclusive classes; its labels are those of the first rater.
            raters: a folder or a pattern of label files for each further rater; a rater may lack cases.
            soft_labels: whether the label files hold probabilities.
            root: folder in which relative patterns begin; None: the current one.

        Raises:
            ArgumentError: both, a dataset without such classes, a rater without any case, or as `files_of`.
        """
        cases = tuple(labelled(dataset, raters, soft_labels, root))
        return replace(dataset, cases=cases, targets=cls.of_classes(dataset.class_names))

    @property
    def of_answers(self) -> LabelMapTargets:
        return LabelMapTargets(self.names, self.values)

    @property
    def description(self) -> str:
        # Networks that were trained on label maps have outputs of the same meaning
        return self.of_answers.description

    def encode(self, label: Tensor) -> Tensor:
        return label.float()

    def label_map(self, label: Tensor) -> Tensor:
        return self.decode(self.reference(label[None])[0])

    def random_labels(
        self, batch: int, patch_size: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        probabilities = torch.rand(batch, self.num_outputs, *patch_size, generator=generator)
        return (probabilities / probabilities.sum(1, keepdim=True))[:, 1:]

    def reference(self, label: Tensor) -> Tensor:
        """Shape: label (batch, classes, *spatial) -> (batch, 1 + classes, *spatial), the background first."""
        label = label.float()
        # Rounding may leave a little less than 0.
        background = (1 - label.sum(1, keepdim=True)).clamp(min=0)
        return torch.cat([background, label], 1)

    def marginal(self, outputs: Tensor, reference: Tensor, annotated: Tensor) -> tuple[Tensor, Tensor]:
        is_annotated = over_voxels(annotated, outputs)
        # What other classes had becomes background again
        classes = torch.where(is_annotated, reference, 0)[:, 1:]
        return self._merged(outputs, annotated), self.reference(classes)

    def _entropy(self, logits: Tensor, reference: Tensor) -> Tensor:
        return F.cross_entropy(logits, reference, reduction="none").mean()

    @property
    def scores(self) -> SoftScores:
        return SoftScores(self)


class SoftScores(DiceScores):
    """The scores of probabilities, beside those of label maps; a row has lists, see `SoftTargets`."""

    targets: SoftTargets

    def row(self, case: ValidatedCase) -> dict[str, list[float | None]]:
        dice = super().row(case)
        rater_dice: list[float | None] = []
        for label_map in case.raters:
            if label_map is None:
                rater_dice.append(None)
                continue
            scores = self.targets.dice(case.prediction, label_map, case.annotated)
            rater_dice.append(metrics_dice.mean(scores.values()))
        annotated = [True] * self.targets.num_outputs if case.annotated is None else case.annotated
        assert case.logits is not None
        calibration = self._calibration(case.logits, case.label, annotated)
        return {"dice": list(dice.values()), "rater_dice": rater_dice, **calibration}

    def _calibration(
        self, logits: Tensor, label: Tensor, annotated: Sequence[bool]
    ) -> dict[str, list[float | None]]:
        """Brier score and calibration error of each class; None if it is not annotated, or no class is there.

        Shape: logits (1, outputs, *spatial), label (1, classes, *spatial).
        """
        predicted = logits[0].softmax(0)[1:].cpu().numpy()
        reference = label[0].float().cpu().numpy()
        # All of the image would hide errors of the foreground among air
        is_foreground = (reference > 0).any(0) | (predicted.sum(0) > 0.5)
        boxes = find_objects(is_foreground.view(np.uint8))
        scores: dict[str, list[float | None]] = {"brier": [], "calibration_error": []}
        for index, is_annotated in enumerate(annotated[1:]):
            if not boxes or not is_annotated:
                scores["brier"].append(None)
                scores["calibration_error"].append(None)
                continue
            pair = (predicted[index, *boxes[0]], reference[index, *boxes[0]])
            scores["brier"].append(brier(*pair))
            scores["calibration_error"].append(calibration_error(*pair))
        return scores

    def logged(self, rows: Mapping[str, Any], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        scores = super().logged(self._dice_rows(rows), losses)
        summary = self.summary(rows)
        scores["brier"] = summary["brier"]
        scores["calibration_error"] = summary["calibration_error"]
        for number, dice in enumerate(summary["rater_dice"], start=1):
            scores[f"rater_dice/{number}"] = dice
        return scores

    def summary(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """`brier` and `calibration_error` are means over classes, `rater_dice` has a mean for each rater."""
        scores = super().summary(self._dice_rows(rows))
        for name in ("brier", "calibration_error"):
            per_class = metrics_dice.mean_per_class([self._by_class(row[name]) for row in rows.values()])
            scores[name] = metrics_dice.mean(per_class.values())
        # Each row has a place for every rater, and none where labels are probabilities
        by_rater = zip(*(row["rater_dice"] for row in rows.values()), strict=True)
        scores["rater_dice"] = [metrics_dice.mean(column) for column in by_rater]
        return scores

    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        lines = super().table(summary)
        if not lines:
            return []
        for number, dice in enumerate(summary.get("val/rater_dice") or [], start=1):
            lines.append((f"mean, against rater {number}", dice))
        lines.append(("Brier score", summary.get("val/brier")))
        lines.append(("calibration error", summary.get("val/calibration_error")))
        return lines

    def case_scores(self, rows: Mapping[str, Any]) -> dict[str, float | None]:
        return super().case_scores(self._dice_rows(rows))

    def case_cells(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        cells = {}
        for name in _BY_CLASS:
            for class_name, value in self._by_class(row[name]).items():
                cells[f"{name}/{class_name}"] = value
        return cells

    def case_entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = {name: self._by_class(row[name]) for name in _BY_CLASS}
        return {**entry, "rater_dice": row["rater_dice"]}

    def over_folds(self, folds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.targets.of_answers.scores.over_folds([self._dice_rows(fold) for fold in folds])

    def _dice_rows(self, rows: Mapping[str, Any]) -> dict[str, ClassScores]:
        """The rows as those of other label maps."""
        return {case: self._by_class(row["dice"]) for case, row in rows.items()}

    def _by_class(self, values: Sequence[float | None]) -> ClassScores:
        return dict(zip(self.targets.names, values, strict=True))
