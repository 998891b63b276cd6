"""Targets of whole images: what they share, how they are scored, and what a run does with them."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.encoder import as_encoder
from medconv.features.image_level.metrics import Columns
from medconv.metrics.dice import mean
from medconv.metrics.segmentation import MetricValues
from medconv.targets.base import Family, Targets, finite_number, names_of
from medconv.targets.scores import NamedScore, Scores
from medconv.utils.errors import ArgumentError

# a row of `validation`: `outputs`, decoded, and `values`, the case's label
CaseOutputs = dict[str, list[float]]
_MAX_NAMES = 20  # rows of a table
_TRIAL_SAMPLES = 6  # random samples on which a loss is tried
_TOLERANCE = 1e-4  # relative difference allowed between a loss and the mean of its samples' losses

WHOLE_IMAGES = Family(
    examine="medconv.features.image_level.examine:examine_image",
    planning="medconv.features.image_level.planning:WholeImages",
    whole_images="medconv.features.image_level.samples",
    validation="medconv.features.image_level.validation:image_validation",
    mixup="medconv.features.image_level.mixup:Mixup",
    forward="medconv.features.image_level.forward:ImageLevelForward",
    check_prepared="medconv.features.image_level.forward:check_prepared",
    output="medconv.features.image_level.output:OutputTable",
    evaluate_table="medconv.features.image_level.evaluation:evaluate",
    views="medconv.features.image_level.views:ImageLevelViews",
)


@dataclass(frozen=True)
class ImageLevelTargets(Targets):
    """The values that each case has, and what a network's outputs mean. A kind implements the abstract
    methods.

    Args:
        names: of the answers, in their order.
        name_word: what a name stands for, for people.
        min_names: the smallest number of names.
        metric_names: the keys of `columns`.
        takes_missing: whether a case may lack some of its values, which are NaN.
        expected_cell: what a cell that holds no value should hold, for messages.
    """

    family: ClassVar[Family] = WHOLE_IMAGES
    per_voxel: ClassVar[bool] = False
    mean_of_outputs: ClassVar[bool] = False
    name_word: ClassVar[str] = "class"
    min_names: ClassVar[int] = 1
    takes_missing: ClassVar[bool] = False
    expected_cell: ClassVar[str] = "a label; if it is a class, list it in class_names"
    metric_names: ClassVar[tuple[str, ...]]
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

    def model(self, node: dict[str, Any]) -> dict[str, Any]:
        return as_encoder(node)

    @property
    def scores(self) -> "TableScores":
        return TableScores(self)

    @property
    def of_table(self) -> Self:
        return self

    @property
    def num_values(self) -> int:
        """Values of a case: one for each name, or the index of its class."""
        return len(self.names)

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of the values of a case, for columns of tables."""
        return self.names

    @abstractmethod
    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        """The metrics of `metric_names`, for each sample of cases.

        Shape: outputs (cases, names), truth (cases, values), counts (samples, cases): how often each sample
        has each case -> per metric (samples,).
        """

    @abstractmethod
    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        """Metrics of each class, label or number. Shape: as in `columns`."""

    @abstractmethod
    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The error of each case, to find the worst ones. Shape: as in `columns` -> (cases,)."""

    @abstractmethod
    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        """Plots over all cases, by name; each (height, width, 3) uint8. Shape: as in `columns`."""

    def arrays(self, rows: Sequence[Mapping[str, Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
        """Outputs (cases, names) and labels (cases, values) of rows of `validation`."""
        outputs = np.array([row["outputs"] for row in rows], float)
        values = np.array([row["values"] for row in rows], float)
        # reshaped, as without rows both are of one axis
        outputs = outputs.reshape(len(rows), len(self.names))
        values = values.reshape(len(rows), self.num_values)
        return outputs, values

    def fitted_temperature(self, outputs: np.ndarray, truth: np.ndarray) -> float:
        """`calibration.temperature`, of calibrated kinds. Shape: as in `columns`."""
        raise NotImplementedError

    def outputs_at_temperature(self, outputs: np.ndarray, temperature: float) -> np.ndarray:
        """`calibration.at_temperature`, of calibrated kinds. Shape: (cases, names)."""
        raise NotImplementedError

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        """Key `cross_entropy`: `image_level.log_loss` with classes as groups; empty: not defined."""
        return {}

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
            raise ValueError(f"no {split} case has {self.name_word} {names}, expected at least one of each")
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
        outputs = self.in_units(noise)
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

    def in_units(self, standardised: Tensor) -> Tensor:
        """What a network gives, from outputs of mean 0 and deviation 1. Shape: (samples, outputs) twice."""
        return standardised

    @abstractmethod
    def label_text(self, values: Sequence[float]) -> str:
        """A case's label as text."""

    @abstractmethod
    def prediction_text(self, outputs: Sequence[float]) -> str:
        """A prediction as text."""

    def label_cells(self, values: Sequence[float]) -> list[Any]:
        """A case's label as cells of a table, one for each of `value_names`."""
        return list(values)

    def label_values(self, values: Sequence[float | None]) -> list[float | None]:
        """A case's values as JSON has them: null for one that is missing."""
        return [None if value is None or math.isnan(value) else value for value in values]

    def cells_per_name(self, values: Sequence[float]) -> list[str]:
        return [f"{value:.4g}" for value in values]

    def shown_output(self, outputs: np.ndarray) -> int:
        """The index of the output that a saliency map of this prediction explains. Shape: (names,)."""
        return int(outputs.argmax())

    def prediction_cells(self, outputs: np.ndarray) -> list[str]:
        """Cells for `prediction_columns`."""
        return []


class TableScores(Scores):
    """The scores of answers that are a row of a table: the metrics of their kind."""

    def __init__(self, targets: ImageLevelTargets) -> None:
        self.targets = targets

    def temperature(self, rows: Mapping[str, CaseOutputs]) -> float | None:
        if not self.targets.calibrated:
            return None
        outputs, truth = self.targets.arrays(list(rows.values()))
        is_finite = np.isfinite(outputs).all(1)
        if not is_finite.any():
            return 1.0
        return self.targets.fitted_temperature(outputs[is_finite], truth[is_finite])

    def at_temperature(self, rows: Mapping[str, CaseOutputs], temperature: float) -> dict[str, CaseOutputs]:
        outputs, _ = self.targets.arrays(list(rows.values()))
        scaled = self.targets.outputs_at_temperature(outputs, temperature).tolist()
        return {
            case: {**row, "outputs": case_outputs}
            for (case, row), case_outputs in zip(rows.items(), scaled, strict=True)
        }

    def logged(
        self, rows: Mapping[str, CaseOutputs], losses: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        return self.summary(rows)

    def summary(self, rows: Mapping[str, CaseOutputs]) -> dict[str, Any]:
        if not rows:
            return {}
        outputs, truth = self.targets.arrays(list(rows.values()))
        # With the monitored metric, which ranks the runs of a sweep
        return {
            **image_level.measure(self.targets, outputs, truth),
            **self.targets.cross_entropy(outputs, truth),
        }

    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        scores = []
        for name in self.targets.metric_names:
            if f"val/{name}" in summary:
                title = name.replace("_", " ")
                scores.append((title, summary[f"val/{name}"]))
        return scores

    def case_cells(self, row: CaseOutputs) -> dict[str, Any]:
        truth = zip(self.targets.value_names, self.targets.label_cells(row["values"]), strict=True)
        outputs = zip(self.targets.names, row["outputs"], strict=True)
        cells = {f"truth/{name}": value for name, value in truth}
        cells |= {f"output/{name}": value for name, value in outputs}
        return cells

    def case_entry(self, row: CaseOutputs) -> dict[str, Any]:
        return dict(row)

    def of_cases(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        """`mean`: metric to value; `intervals`: metric to its 95 % interval; `per_class`: as `per_name`."""
        intervals = image_level.intervals(self.targets, outputs, truth)
        return {
            "mean": image_level.measure(self.targets, outputs, truth),
            "intervals": {name: list(ends) for name, ends in intervals.items()},
            "per_class": self.targets.per_name(outputs, truth),
        }

    def over_folds(self, folds: Sequence[Mapping[str, CaseOutputs]]) -> dict[str, Any]:
        rows = [row for fold in folds for row in fold.values()]
        summaries = [self.summary(fold) for fold in folds if fold]  # none has a known value in some
        means = {}
        for name in self.targets.metric_names:
            means[name] = mean(summary[name] for summary in summaries)
        outputs, truth = self.targets.arrays(rows)
        return {**self.of_cases(outputs, truth), "mean_of_folds": means}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        undefined = (None, None)
        intervals = [scores["intervals"].get(name, undefined) for name in scores["mean"]]
        return [
            ("all cases", list(scores["mean"].values())),
            ("mean of folds", list(scores["mean_of_folds"].values())),
            ("95 % from", [low for low, _ in intervals]),
            ("95 % to", [high for _, high in intervals]),
        ]

    def columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        return [(name, summary.get(name)) for name in self.targets.metric_names]

    def text(self, outputs: np.ndarray, truth: np.ndarray) -> str:
        """Markdown tables of the scores, and of the number of cases of each class or label."""
        lines = [f"{len(truth)} cases, {self.targets.kind}", "", "| score | |", "|---|---|"]
        for metric, value in image_level.measure(self.targets, outputs, truth).items():
            cell = "-" if value is None else f"{value:.4f}"
            lines.append(f"| {metric} | {cell} |")
        counts = self.targets.class_counts(truth)
        if counts is not None:
            lines += ["", "| name | cases |", "|---|---|"]
            rows = list(zip(self.targets.names, counts, strict=True))
            lines += [f"| {name} | {count} |" for name, count in rows[:_MAX_NAMES]]
        return "\n".join(lines)


@dataclass(frozen=True)
class NumberTargets(ImageLevelTargets):
    """A case has a number for each name, in a column each."""

    expected_cell: ClassVar[str] = "a number; leave out rows without one"

    @classmethod
    def from_columns(
        cls, columns: Sequence[str], labels: Sequence[Sequence[str]], names: Sequence[str] | None
    ) -> Self:
        if names and len(names) != len(columns):
            raise ArgumentError(
                "class_names", f" needs a name for each of {', '.join(columns)}, got {list(names)}"
            )
        return cls(tuple(map(str, names or columns)))

    def cell_error(self, number: float) -> str | None:
        """What a cell must hold, if this number is wrong there; None: it is right."""
        return None

    def parse(self, labels: Mapping[str, str]) -> tuple[float, ...]:
        return tuple(self._parse(column, label) for column, label in labels.items())

    def _parse(self, column: str, label: str) -> float:
        number = finite_number(label)
        if number is None:
            raise ValueError(f"column {column!r} must hold a finite number, got {label!r}")
        rule = self.cell_error(number)
        if rule:
            raise ValueError(
                f"column {column!r} must hold {rule}, got {label!r}; target_type=regression takes any number"
            )
        return number
