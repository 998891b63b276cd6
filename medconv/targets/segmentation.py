"""Targets per voxel: what classes of label maps and overlapping regions share."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import ClassScores
from medconv.metrics.statistics import describe
from medconv.targets.base import Targets, label_values, list_of, names_of
from medconv.targets.monitor import DICE, MonitoredMetric

ABSENT = -1e4  # a logit whose probability is 0 beside any other, within the range of fp16
_TOLERANCE = 1e-4  # relative; a loss that changes by less when voxels are shuffled ignores their positions
_EDGE, _SHORT_EDGE = 16, 4  # voxels along each axis of the trial batch; the short one when it is shuffled


@dataclass(frozen=True)
class SegmentationTargets(Targets):
    """The foreground to segment: what `LabelMapTargets` and `RegionTargets` share.

    Args:
        names: of the foreground, in the order of the channels.
        values: the label values of each name.
        ignore: label value of unlabelled voxels; None if there is none.
    """

    per_voxel: ClassVar[bool] = True
    default_loss: ClassVar[str] = "dice_ce"
    score_title: ClassVar[str] = "Dice"
    monitored: ClassVar[MonitoredMetric] = DICE
    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    ignore: int | None = None
    also_ignored: tuple[int, ...] = field(default=(), kw_only=True)

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        if not {"names", "values", "ignore"} <= set(content):
            raise ValueError("targets of label maps need names, values and ignore")
        names, ignore = names_of(content["names"]), content["ignore"]
        values = tuple(tuple(label_values(group)) for group in list_of(content["values"]))
        if len(values) != len(names) or not all(values):
            raise ValueError("each name needs its label values")
        also = tuple(label_values(content.get("also_ignored", ())))
        ignored = label_values([] if ignore is None else [ignore, *also])
        if {*ignored} & {v for group in values for v in group} or (also and ignore is None):
            raise ValueError("the label value to ignore must not be a class")
        targets = cls(names, values, ignore, also_ignored=also, **cls._further_fields(content))
        if len(set(targets.written)) != len(names):
            raise ValueError("each name needs a label value of its own; for regions, `order` gives it")
        if any(value not in group for value, group in zip(targets.written, values, strict=True)):
            raise ValueError("the label value that a region writes must be one of its values")
        return targets

    @classmethod
    def _further_fields(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def plain(self) -> dict[str, Any]:
        values = [list(group) for group in self.values]
        also = {"also_ignored": list(self.also_ignored)} if self.also_ignored else {}
        return {"kind": self.kind, "names": list(self.names), "values": values, "ignore": self.ignore, **also}

    @property
    def value_names(self) -> dict[int, str]:
        """Label value of a reference to the class, or to the regions that hold it."""
        values = sorted({value for group in self.values for value in group})
        return {v: " + ".join(name for name, group in self.by_name.items() if v in group) for v in values}

    @property
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Name to its label values."""
        return dict(zip(self.names, self.values, strict=True))

    @property
    def words(self) -> str:
        """For messages, such as `whole=1+2, core=2`."""
        return ", ".join(f"{name}={'+'.join(map(str, values))}" for name, values in self.by_name.items())

    @property
    def description(self) -> str:
        return f"{self.kind}: {self.words}"

    @property
    @abstractmethod
    def written(self) -> tuple[int, ...]:
        """The label value that each name writes into a label map, later over earlier."""

    @property
    def num_values(self) -> int:
        """Label values are below this number; `ignore` is not counted."""
        return 1 + max((v for group in self.values for v in group), default=0)

    def labelled(self, label: Tensor) -> Tensor | None:
        """Mask of the labelled voxels; None if all are. Shape: any -> same, bool."""
        return None if self.ignore is None else label != self.ignore

    def one_ignored(self, label: np.ndarray) -> np.ndarray:
        """A label map with `ignore` in the place of the values of `also_ignored`."""
        if self.ignore is None or not self.also_ignored:
            return label
        return np.where(np.isin(label, self.also_ignored), self.ignore, label).astype(label.dtype)

    @abstractmethod
    def reference(self, label: Tensor) -> Tensor:
        """What the loss compares the outputs with; unlabelled voxels become background.

        Shape: label (batch, 1, *spatial) -> same; for regions (batch, regions, *spatial) of 0 and 1.
        """

    @abstractmethod
    def decode(self, logits: Iterable[Tensor]) -> Tensor:
        """Logits to a label map.

        Shape: (outputs, *spatial), or an iterator of (*spatial) channels, so that only one needs to be in
        memory -> (*spatial) int16.
        """

    @abstractmethod
    def decode_mean(self, probabilities: Iterable[Tensor]) -> Tensor:
        """As `decode`, from channels of probabilities."""

    @abstractmethod
    def probabilities(self, channels: Iterable[Tensor], again: Iterable[Tensor]) -> Iterator[Tensor]:
        """Channels of logits to channels of probabilities. Args: again: the same channels once more, so that
        not all of them are in memory.
        """

    def encode(self, label: Tensor) -> Tensor:
        """The label map itself, which is resized for coarser heads before it becomes masks."""
        return label

    def random_labels(self, batch: int, patch_size: Sequence[int]) -> Tensor:
        return torch.randint(self.num_values, (batch, 1, *patch_size))

    @abstractmethod
    def annotated_outputs(self, values: Collection[int]) -> tuple[bool, ...]:
        """The outputs that have a reference in a case of which only these label values are annotated."""

    @abstractmethod
    def marginal(self, outputs: Tensor, reference: Tensor, annotated: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and reference of a batch without what is not annotated, for any loss. Overlapping regions
        get a probability of 0 and no voxel; the probability of exclusive classes joins the background's,
        as their voxels do in the reference, so that their logits have a gradient as background alone.

        Args: annotated: (batch, outputs) bool.
        Source: the marginal loss of Shi et al. 2021, arXiv:2007.03868.
        """

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        """A loss with an argument `labelled` gets the mask of labelled voxels; any other one only these
        voxels, in one row as a single sample. This is exact for losses that sum over a batch's voxels
        regardless of their positions, as `try_loss` checks. 0 if no voxel is labelled.
        """
        reference, labelled = self.reference(encoded), self.labelled(encoded)
        if annotated is not None:
            outputs, reference = self.marginal(outputs, reference, annotated)
        if labelled is None:
            return loss(outputs, reference)
        if _takes_mask(loss):
            return loss(outputs, reference, labelled=labelled)
        if not labelled.any():
            return outputs[:0].sum()  # 0, with a gradient of 0
        return loss(_only(outputs, labelled), _only(reference, labelled))

    def try_loss(self, loss: Any, spatial_dims: int) -> str | None:
        """With ignored voxels that the loss knows nothing of, it must not depend on where voxels lie."""
        shuffles = self.ignore is not None and not _takes_mask(loss)
        generator = torch.Generator().manual_seed(0)
        size = (_SHORT_EDGE if shuffles else _EDGE,) * spatial_dims
        logits = torch.randn(2, self.num_outputs, *size, generator=generator)
        label = torch.randint(self.num_values, (2, 1, *size), generator=generator)
        order = torch.randperm(label.numel(), generator=generator)
        reference = self.reference(label)
        plain = shuffled = float(loss(logits, reference))
        if shuffles:
            everywhere = torch.ones_like(label, dtype=torch.bool)
            rows = [_only(values, everywhere)[:, :, order] for values in (logits, reference)]
            shuffled = float(loss(*rows))
        if not math.isfinite(plain + shuffled):
            return f"is {plain + shuffled} for {self.kind} targets, expected a finite number"
        if abs(plain - shuffled) <= _TOLERANCE * abs(plain):
            return None
        return (
            f"changes when the voxels of a batch are shuffled ({plain:.4g}, {shuffled:.4g}), so ignored "
            "voxels cannot be excluded from it; use loss.batch=true if it has that argument, or loss=dice_ce"
        )

    def cross_entropy(
        self, logits: Tensor, label: Tensor, annotated: Sequence[bool] | None = None
    ) -> float | None:
        """Mean cross-entropy over the labelled voxels (and regions, if they overlap); None if there are none.

        Shape: logits (batch, outputs, *spatial), label (batch, 1, *spatial).
        Args: annotated: as `marginal`, one for each output.
        """
        label = label.to(logits.device)  # large logits are moved from a GPU to main memory
        labelled, reference = self.labelled(label), self.reference(label)
        if annotated is not None:
            known = torch.tensor([annotated] * len(logits), device=logits.device)
            logits, reference = self.marginal(logits, reference, known)
        if labelled is not None:
            if not labelled.any():
                return None
            logits, reference = _only(logits, labelled), _only(reference, labelled)
        return float(self._entropy(logits, reference))

    @abstractmethod
    def _entropy(self, logits: Tensor, reference: Tensor) -> Tensor: ...

    def dice(
        self, prediction: np.ndarray, reference: np.ndarray, annotated: Sequence[bool] | None = None
    ) -> ClassScores:
        """Dice of each name; the row of a case in a checkpoint's `validation`. Shape: two label maps.

        Args: annotated: of each output; others are undefined (None).
        """
        row = metrics_dice.dice(prediction, reference, self)
        known = [True] * len(self.names) if annotated is None else annotated[-len(self.names) :]
        return {name: row[name] if there else None for name, there in zip(self.names, known, strict=True)}

    def logged(
        self, rows: Mapping[str, ClassScores], losses: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        per_class = metrics_dice.mean_per_class(list(rows.values()))
        scores = {"cross_entropy": metrics_dice.mean(losses), "dice": metrics_dice.mean(per_class)}
        return {**scores, **{f"dice/{name}": value for name, value in per_class.items()}}

    def summary(self, rows: Mapping[str, ClassScores]) -> dict[str, Any]:
        per_class = metrics_dice.mean_per_class(list(rows.values()))
        return {"dice": metrics_dice.mean(per_class), "dice_per_class": per_class}

    def score_table(self, summary: Mapping[str, Any]) -> list[tuple[str, float | None]]:
        per_class = summary.get("val/dice_per_class") or {}
        mean = [("mean foreground", summary.get("val/dice"))] if per_class else []
        return [*per_class.items(), *mean]

    def case_cells(self, row: ClassScores) -> dict[str, float | None]:
        return {f"dice/{name}": value for name, value in row.items()}

    def case_entry(self, row: ClassScores) -> dict[str, Any]:
        return {"dice": row}

    def over_folds(self, folds: Sequence[Mapping[str, ClassScores]]) -> dict[str, Any]:
        rows, summaries = [row for fold in folds for row in fold.values()], list(map(self.summary, folds))
        per_class = {
            name: _over_cases([row[name] for row in rows], [s["dice_per_class"][name] for s in summaries])
            for name in summaries[0]["dice_per_class"]
        }
        mean = _over_cases([metrics_dice.mean(row) for row in rows], [s["dice"] for s in summaries])
        mean["dice"] = metrics_dice.mean({name: score["dice"] for name, score in per_class.items()})
        return {"mean": mean, "per_class": per_class}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        columns = [*scores["per_class"].values(), scores["mean"]]
        lines = {"all cases, mean": "dice", "all cases, sd": "sd", "mean of folds": "mean_of_folds"}
        if any(column["n"] < cases for column in columns):
            lines["defined in"] = "n"
        return [(title, [column[key] for column in columns]) for title, key in lines.items()]

    def score_columns(self, summary: Mapping[str, Any]) -> list[tuple[str, float | None]]:
        return [*summary["dice_per_class"].items(), ("mean", summary["dice"])]


def _over_cases(values: Sequence[float | None], of_folds: Sequence[float | None]) -> dict[str, Any]:
    """The mean Dice over cases with its spread, and the mean of the folds' means."""
    described = describe(values)
    spread = {key: described[key] for key in ("sd", "n", "low", "high")}
    return {"dice": described["mean"], **spread, "mean_of_folds": describe(of_folds)["mean"]}


def _takes_mask(loss: Any) -> bool:
    return _has_mask_argument(type(loss).forward if isinstance(loss, nn.Module) else loss)


@lru_cache(maxsize=16)
def _has_mask_argument(function: Callable[..., Any]) -> bool:
    """Asked in every step, and answered once."""
    return "labelled" in signature(function).parameters


def _only(values: Tensor, labelled: Tensor) -> Tensor:
    """The labelled voxels of all samples: (batch, channels, *spatial) -> (1, channels, voxels, 1, ...)."""
    row = values.movedim(1, -1)[labelled[:, 0]].T
    return row.reshape(1, *row.shape, *(1,) * (values.ndim - 3))
