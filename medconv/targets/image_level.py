"""Targets of whole images: what multiclass, multilabel and regression targets share."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from medconv.targets.base import names_of
from medconv.targets.family import WHOLE_IMAGES, Family
from medconv.targets.image_level_scores import ImageLevelScoredTargets

_TRIAL_SAMPLES = 6  # random samples on which a loss is tried
_TOLERANCE = 1e-4  # relative difference allowed between a loss and the mean of its samples' losses


@dataclass(frozen=True)
class ImageLevelTargets(ImageLevelScoredTargets):
    """The values that each case has, and what a network's outputs mean. A kind implements the abstract
    methods.

    Args:
        names: of the answers, in their order.
        name_word: what a name stands for, for people.
        min_names: the smallest number of names.
    """

    family: ClassVar[Family] = WHOLE_IMAGES
    per_voxel: ClassVar[bool] = False
    name_word: ClassVar[str] = "class"
    min_names: ClassVar[int] = 1
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.names) < self.min_names:
            raise ValueError(f"too few names of {self.kind}: {list(self.names)}")
        for index, name in enumerate(self.names):
            if name in self.names[:index]:
                raise ValueError(f"{self.kind} names: {name} is there twice")

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        if "names" not in content:
            raise ValueError(f"{cls.kind} targets need names")
        return cls(names_of(content["names"]))

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": list(self.names)}

    @property
    def num_outputs(self) -> int:
        return len(self.names)

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self.names

    @property
    def prediction_columns(self) -> tuple[str, ...]:
        """Columns of a table of predictions beside those of the answers; see `prediction_cells`."""
        return ()

    @classmethod
    @abstractmethod
    def from_columns(
        cls, columns: Sequence[str], labels: Sequence[Sequence[str]], names: Sequence[str] | None
    ) -> Self:
        """The targets of a table.

        Args:
            columns: the columns of the labels.
            labels: per column the text of each row.
            names: `data.class_names`; None: not set.
        Raises:
            ValueError: the columns do not fit; the message names the key.
        """

    @abstractmethod
    def parse(self, labels: Mapping[str, str]) -> tuple[float, ...]:
        """The values of a case from its cells, column to text.

        Raises:
            ValueError: a cell does not fit; the message names the column.
        """

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        """Why the values of a case are invalid; None if they are valid."""
        if len(values) != self.num_values:
            return f"expected {self.num_values} values, got {len(values)}"
        if not all(map(math.isfinite, values)):
            return f"expected finite numbers, got {list(values)}"
        return None

    def class_counts(self, values: np.ndarray) -> list[int] | None:
        members = self.members(values)
        if members is None:
            return None
        return [int(count) for count in members.sum(0)]

    @abstractmethod
    def members(self, values: np.ndarray) -> np.ndarray | None:
        """Which classes or labels each case has; None: there are none.

        Shape: (cases, values) -> (cases, names), bool.
        """

    def balanced_groups(self, values: np.ndarray) -> list[np.ndarray]:
        members = self.members(values)
        if members is None:
            return super().balanced_groups(values)
        return [np.flatnonzero(column) for column in members.T]

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        missing = self.missing(values)
        if not missing:
            return None
        names = ", ".join(missing)
        # with one class alone nothing can be validated
        if split == "training" or len(missing) >= len(self.names) - 1:
            raise ValueError(
                f"no {split} case has {self.name_word} {names}, expected at least one of each; another "
                "fold or num_folds, or class_names without it, may help"
            )
        return f"no {split} case has {names}, so there is no score of it"

    def missing(self, values: np.ndarray) -> list[str]:
        """Classes or labels without a case. Shape: (cases, values)."""
        counts = self.class_counts(values)
        if not counts:  # numbers: every case has each
            counts = [len(values)] * len(self.names)
        named_counts = zip(self.names, counts, strict=True)
        return [name for name, count in named_counts if not count]

    @abstractmethod
    def decode(self, logits: Tensor) -> Tensor:
        """Logits to answers: probabilities, or numbers. Shape: (..., outputs) -> (..., names), float32."""

    def encode(self, label: Tensor) -> Tensor:
        """What the loss compares outputs with. Shape: (batch, values) -> (batch, outputs), float32."""
        return label.float()

    def random_labels(self, batch: int, patch_size: Sequence[int]) -> Tensor:
        return torch.randint(2, (batch, self.num_values))

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        return loss(outputs, encoded)

    def try_loss(self, loss: Any, spatial_dims: int) -> str | None:
        """The loss must be a mean over samples, so that accumulated batches have the gradient of one."""
        # its own generator: a trial must not change the run's random numbers
        generator = torch.Generator().manual_seed(0)
        shape = (_TRIAL_SAMPLES, self.num_values)
        label = torch.randint(2, shape, generator=generator).float()
        noise = torch.randn(_TRIAL_SAMPLES, self.num_outputs, generator=generator)
        outputs = self._trial_outputs(noise)
        encoded = self.encode(label)
        batch_loss = float(self.compare(loss, outputs, encoded))
        sum_of_losses = 0.0
        for output, target in zip(outputs.split(1), encoded.split(1), strict=True):
            sum_of_losses += float(self.compare(loss, output, target))
        mean_loss = sum_of_losses / _TRIAL_SAMPLES
        if not math.isfinite(batch_loss):
            return f"is {batch_loss} for {self.kind} targets, expected a finite number"
        scale = max(abs(batch_loss), _TOLERANCE)  # of losses near 0 the difference counts, not its share
        if abs(batch_loss - mean_loss) <= _TOLERANCE * scale:
            return None
        return f"is not a mean over samples, as a loss for {self.kind} targets must be"

    def _trial_outputs(self, noise: Tensor) -> Tensor:
        return noise

    @abstractmethod
    def label_text(self, values: Sequence[float]) -> str:
        """A case's label as text."""

    @abstractmethod
    def prediction_text(self, outputs: Sequence[float]) -> str:
        """A prediction as text."""

    def label_cells(self, values: Sequence[float]) -> list[Any]:
        """A case's label as cells of a table, one for each of `value_names`."""
        return list(values)

    def cells_per_name(self, values: Sequence[float]) -> list[str]:
        return [f"{value:.4g}" for value in values]

    def shown_output(self, outputs: np.ndarray) -> int:
        """The index of the output that a saliency map of this prediction explains. Shape: (names,)."""
        return int(outputs.argmax())

    def prediction_cells(self, outputs: np.ndarray) -> list[str]:
        """Cells for `prediction_columns`."""
        return []
