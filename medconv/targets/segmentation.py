"""Targets per voxel: what classes of label maps and overlapping regions share."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from medconv.metrics.dice import ClassScores
from medconv.metrics.dice import dice as label_map_dice
from medconv.targets.base import TRIAL_EDGE, Family, Targets, label_values, names_of
from medconv.targets.scores import DICE, DiceScores, MonitoredMetric

ABSENT = -1e4  # a logit whose probability is 0 beside any other, within the range of fp16
_TOLERANCE = 1e-4  # relative; a loss that changes by less when voxels are shuffled ignores their positions
_SHUFFLED_TRIAL_EDGE = 4  # of a trial batch that is shuffled


@dataclass(frozen=True)
class SegmentationTargets(Targets):
    """The foreground to segment: what `LabelMapTargets` and `RegionTargets` share.

    Args:
        names: of the foreground, in the order of the channels.
        values: the label values of each name.
        ignore: label value of unlabelled voxels; None if there is none.
        also_ignored: further label values of unlabelled voxels; `one_ignored` replaces them by `ignore`.
    """

    family: ClassVar[Family] = Family()
    per_voxel: ClassVar[bool] = True
    answers_classes: ClassVar[bool] = True
    draws_classes: ClassVar[bool] = False  # `learned_label` makes the classes; files have other values
    monitored: ClassVar[MonitoredMetric] = DICE
    scores_probabilities: ClassVar[bool] = False
    default_loss: ClassVar[str] = "dice_ce"
    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    ignore: int | None = None
    also_ignored: tuple[int, ...] = field(default=(), kw_only=True)

    @classmethod
    def from_fields(cls, content: Mapping[str, Any], **further_fields: Any) -> Self:
        if not {"names", "values", "ignore"} <= set(content) or not isinstance(content["values"], Sequence):
            raise ValueError("targets of label maps need names, values and ignore")
        # the file may come from anywhere: each part is checked before it is used
        names = names_of(content["names"])
        values = tuple(tuple(label_values(group)) for group in content["values"])
        if len(values) != len(names) or not all(values):
            raise ValueError("each name needs its label values")
        ignore = content["ignore"]
        also_ignored = tuple(label_values(content.get("also_ignored", ())))
        ignored = label_values([] if ignore is None else [ignore, *also_ignored])
        of_classes = {value for group in values for value in group}
        if of_classes & set(ignored) or (also_ignored and ignore is None):
            raise ValueError("the label value to ignore must not be a class")
        targets = cls(names, values, ignore, also_ignored=also_ignored, **further_fields)
        # else a label map could not tell two names apart
        if len(set(targets.written)) != len(names):
            raise ValueError("each name needs a label value of its own; for regions, `order` gives it")
        # a written label map is read as a reference again
        for value, group in zip(targets.written, values, strict=True):
            if value not in group:
                raise ValueError("the label value that a region writes must be one of its values")
        return targets

    def plain(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "kind": self.kind,
            "names": list(self.names),
            "values": [list(group) for group in self.values],
            "ignore": self.ignore,
        }
        if self.also_ignored:  # left out where empty, so that other files keep their content
            content["also_ignored"] = list(self.also_ignored)
        return content

    @property
    def value_names(self) -> dict[int, str]:
        """Label value of a reference to the class, or to the regions that hold it."""
        # a value of overlapping regions lies in several
        names: dict[int, str] = {}
        for value in sorted({value for group in self.values for value in group}):
            holders = [name for name, group in self.by_name.items() if value in group]
            names[value] = " + ".join(holders)
        return names

    @property
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Name to its label values."""
        return dict(zip(self.names, self.values, strict=True))

    @property
    def words(self) -> str:
        """For messages, such as `whole=1+2, core=2`."""
        texts = []
        for name, values in self.by_name.items():
            texts.append(f"{name}={'+'.join(map(str, values))}")
        return ", ".join(texts)

    @property
    def of_answers(self) -> "SegmentationTargets":
        """The targets that the answers have, which are label maps."""
        return self

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
        return 1 + max((value for group in self.values for value in group), default=0)

    def labelled(self, label: Tensor) -> Tensor | None:
        """Mask of the labelled voxels; None if all are. Shape: any -> same, bool."""
        if self.ignore is None:
            return None
        return label != self.ignore

    def one_ignored(self, label: np.ndarray) -> np.ndarray:
        """A label map with `ignore` in the place of the values of `also_ignored`."""
        if self.ignore is None or not self.also_ignored:
            return label
        # the loss and the metrics know `ignore` alone
        is_ignored = np.isin(label, self.also_ignored)
        return np.where(is_ignored, self.ignore, label).astype(label.dtype)

    def learned_label(self, label: np.ndarray) -> np.ndarray:
        """The label map that the network learns, from that of a file. Shape: (X, Y, Z) -> same."""
        return label

    def label_doubts(self, label: np.ndarray) -> list[str]:
        """What looks wrong in the label map of a file, for the check of a dataset."""
        return []

    def answer(self, label: np.ndarray) -> np.ndarray:
        """The answer for an image, from what `decode` gave for all of it. Shape: (X, Y, Z) int16 -> same."""
        return label

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
    def log_total(self, channels: Iterable[Tensor]) -> Tensor | None:
        """What `probability` needs of all channels of logits, each (*spatial); None: nothing."""

    @abstractmethod
    def probability(self, logits: Tensor, log_total: Tensor | None) -> Tensor:
        """A channel's probabilities, so that only one needs to be in memory.

        Shape: (*spatial) -> same.
        Args:
            log_total: of all channels.
        """

    def dice(
        self, prediction: np.ndarray, reference: np.ndarray, annotated: Sequence[bool] | None = None
    ) -> ClassScores:
        """Dice of each name; the row of a case in a checkpoint's `validation`. Shape: two label maps.

        Args:
            annotated: of each output; scores of outputs without a reference are undefined (None).
        """
        # measured for all names, then those without a reference are dropped: the label maps are read once
        scores = label_map_dice(prediction, reference, self)
        if annotated is None:
            return scores
        # of exclusive classes, the first output is the background
        name_annotated = annotated[-len(self.names) :]
        pairs = zip(self.names, name_annotated, strict=True)
        return {name: scores[name] if is_annotated else None for name, is_annotated in pairs}

    @property
    def scores(self) -> DiceScores:
        return DiceScores(self)

    def encode(self, label: Tensor) -> Tensor:
        """The label map itself, which is resized for coarser heads before it becomes masks."""
        return label

    def label_map(self, label: Tensor) -> Tensor:
        """A label as a label map, for pictures. Shape: as in a batch, of one sample -> (*spatial)."""
        return label[0]

    def random_labels(
        self, batch: int, patch_size: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        return torch.randint(self.num_values, (batch, 1, *patch_size), generator=generator)

    @abstractmethod
    def annotated_outputs(self, values: Collection[int]) -> tuple[bool, ...]:
        """The outputs that have a reference in a case of which only these label values are annotated."""

    @abstractmethod
    def marginal(self, outputs: Tensor, reference: Tensor, annotated: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and reference of a batch without the outputs that are not annotated, for any loss.

        Overlapping regions get a probability of 0 and no voxel; the probability of exclusive classes joins
        the background's, as their voxels do in the reference, so that their logits have a gradient as
        background alone.

        Args:
            outputs: (batch, outputs, *spatial), logits.
            reference: what `reference` returns.
            annotated: (batch, outputs) bool.
        Source: the marginal loss of Shi et al. 2021, arXiv:2007.03868.
        """

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        """A loss with an argument `labelled` gets the mask of labelled voxels; any other one only these
        voxels, in one row as a single sample. This is exact for losses that sum over a batch's voxels
        regardless of their positions, as `try_loss` checks. 0 if no voxel is labelled.
        """
        reference = self.reference(encoded)
        labelled = self.labelled(encoded)
        # outputs without a reference get no gradient of their own
        if annotated is not None:
            outputs, reference = self.marginal(outputs, reference, annotated)
        if labelled is None:
            return loss(outputs, reference)
        if takes_mask(loss):
            return loss(outputs, reference, labelled=labelled)
        if not labelled.any():
            return outputs[:0].sum()  # 0, with a gradient of 0
        return loss(labelled_row(outputs, labelled), labelled_row(reference, labelled))

    def try_loss(self, loss: Any, spatial_dims: int) -> str | None:
        """A loss without an argument `labelled` must not depend on the positions of voxels, if some are
        ignored.
        """
        shuffles = self.ignore is not None and not takes_mask(loss)
        # small where it is shuffled: sums over few voxels differ less by rounding
        edge = _SHUFFLED_TRIAL_EDGE if shuffles else TRIAL_EDGE
        size = (edge,) * spatial_dims
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2, self.num_outputs, *size, generator=generator)
        label = self.random_labels(2, size, generator)
        if shuffles:
            reference = self.reference(label)
            value = float(loss(logits, reference))
            # voxels of both samples change places
            order = torch.randperm(label[:, 0].numel(), generator=generator)
            everywhere = torch.ones_like(label, dtype=torch.bool)
            shuffled_logits = labelled_row(logits, everywhere)[:, :, order]
            shuffled_reference = labelled_row(reference, everywhere)[:, :, order]
            shuffled = float(loss(shuffled_logits, shuffled_reference))
        else:
            value = shuffled = float(self.compare(loss, logits, label))
        if not math.isfinite(value + shuffled):
            return f"is {value + shuffled} for {self.kind} targets, expected a finite number"
        if abs(value - shuffled) <= _TOLERANCE * abs(value):
            return None
        return (
            f"changes when the voxels of a batch are shuffled ({value:.4g}, {shuffled:.4g}), so ignored "
            "voxels cannot be excluded from it; use its argument batch=true, if it has one, or dice_ce"
        )

    def cross_entropy(
        self, logits: Tensor, label: Tensor, annotated: Sequence[bool] | None = None
    ) -> float | None:
        """Mean cross-entropy over the labelled voxels (and regions, if they overlap); None if there are none.

        Shape: logits (batch, outputs, *spatial), label (batch, 1, *spatial).

        Args:
            annotated: as in `marginal`, one for each output.
        """
        label = label.to(logits.device)  # large logits are moved from a GPU to main memory
        labelled = self.labelled(label)
        reference = self.reference(label)
        if annotated is not None:
            batch_annotated = torch.tensor([annotated] * len(logits), device=logits.device)
            logits, reference = self.marginal(logits, reference, batch_annotated)
        if labelled is not None:
            if not labelled.any():
                return None
            logits = labelled_row(logits, labelled)
            reference = labelled_row(reference, labelled)
        return float(self._entropy(logits, reference))

    @abstractmethod
    def _entropy(self, logits: Tensor, reference: Tensor) -> Tensor: ...


def takes_mask(loss: Any) -> bool:
    """Whether a loss has an argument for the mask of labelled voxels."""
    function = type(loss).forward if isinstance(loss, nn.Module) else loss
    return _has_mask_argument(function)


def over_voxels(flags: Tensor, outputs: Tensor) -> Tensor:
    """Flags of each sample's outputs, for all of their voxels.

    Shape: (batch, outputs), outputs (batch, outputs, *spatial) -> (batch, outputs, 1, ...).
    """
    return flags.view(*flags.shape, *(1,) * (outputs.ndim - 2))


@lru_cache(maxsize=16)
def _has_mask_argument(function: Callable[..., Any]) -> bool:
    """Cached, since every step asks."""
    return "labelled" in signature(function).parameters


def labelled_row(values: Tensor, labelled: Tensor) -> Tensor:
    """The labelled voxels of all samples: (batch, channels, *spatial) -> (1, channels, voxels, 1, ...)."""
    # channels last, so that the mask takes whole voxels
    row = values.movedim(1, -1)[labelled[:, 0]].T
    trailing_ones = (1,) * (values.ndim - 3)
    return row.reshape(1, *row.shape, *trailing_ones)
