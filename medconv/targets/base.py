"""What a network predicts, as one protocol that every kind of targets implements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from medconv import doors
from medconv.targets.scores import MonitoredMetric, Scores
from medconv.utils.errors import ArgumentError

TRIAL_EDGE = 16  # voxels along each axis of the batch that a loss is tried on
HIGHEST = torch.iinfo(torch.int16).max  # the largest label value
# Kinds of targets by their names; features bring further ones by the door `TARGETS`.
KINDS = {
    "label_map": "medconv.targets.label_map:LabelMapTargets",
    "regions": "medconv.targets.regions:RegionTargets",
}


@dataclass(frozen=True)
class Family:
    """What a family of targets has in the place of what the core does with label maps.

    Each text names an object, "module:object"; "": the core's own. The core asks where it would do its own
    (`targets.family.own("forward")`): once for a function, and for a module once for each thing that it has.

    Args:
        examine: (case, image, dataset, report): completes the report, in the place of the label map.
        labels: module, for kinds with an output per voxel whose labels are no label maps, of
            `settings(targets)`, plain values that prepared labels depend on, or None; of
            `prepared(targets, case, image, crop_info, config)`, the arrays `label` and `soft_label` of a
            case's `Entry`, from its native image; and of `reference(targets, case, grid)`, what a validation
            compares with, as items of `CaseDataset`.
        planning: a `planning.planner.PatchSearch`.
        whole_images: a `data.loading.samplers.WholeImages`, for targets of whole images.
        validation: (config, targets, window) -> `training.validation.Validation`.
        mixup: (alpha, seed) -> `training.task.Mixup`; "": samples are not mixed.
        keeps: (targets, image) -> what `forward` needs of a `NamedImage` beside its prepared arrays.
        forward: (members, device, batch_size) -> `inference.predictor.Forward`.
        check_prepared: (image, member, its shape after preprocessing, crop) -> doubts of it; raises
            ValueError if the network cannot take it.
        output: (folder, targets, settings, about) -> `inference.output.Output`.
        evaluate_table: (predictions, labels, compare, **options) -> `evaluation.results.Evaluation`, of
            predictions that are a table; "": they are images.
        evaluate: (predictions, references, compare, workers=, images=) -> `evaluation.results.Evaluation`,
            of folders of predictions that are images, but no label maps of classes.
        views: (targets, cases, spacing_mm) -> `features.pictures.callbacks.CaseViews`.
    """

    examine: str = ""
    labels: str = ""
    planning: str = ""
    whole_images: str = ""
    validation: str = ""
    mixup: str = ""
    keeps: str = ""
    forward: str = ""
    check_prepared: str = ""
    output: str = ""
    evaluate_table: str = ""
    evaluate: str = ""
    views: str = ""

    def own(self, name: str) -> Any:
        """The object of this name; None: the core's."""
        entry = getattr(self, name)
        return doors.load(entry) if entry else None


class Targets(ABC):
    """What a network's outputs mean: how labels become what a loss compares outputs with, how outputs become
    answers, and which metric is monitored. `scores` says how answers are scored.

    A kind is a subclass with a `kind`, found by its name in `all_kinds`. `SegmentationTargets` is the base of
    kinds with an output per voxel, `ImageLevelTargets` of those with outputs per image.

    Args:
        kind: its name in configs, checkpoints and manifests.
        family: what a run does with its kind of labels.
        per_voxel: whether outputs have the image's axes.
        answers_classes: whether answers are label maps whose values stand for `names`.
        exclusive: whether outputs exclude each other (softmax).
        can_swap_labels: whether `data.flip_label_pairs` can exchange labels under mirroring.
        default_loss: the option of `loss` that `loss=auto` takes.
        monitored: the validation metric that ranks checkpoints.
        output_meaning: how answers follow from outputs, for people.
        calibrated: whether logits are divided by a temperature that fits the validation cases.
        unbounded: whether answers are numbers of any size, not probabilities.
        mean_of_outputs: whether several networks average their outputs; else what these mean.
        labels_in_mm: whether labels are positions in mm of the images' headers, which have to be right then.
        loss_kinds: further kinds whose losses fit, since their references are alike.
        names: of the foreground classes, regions, labels or numbers.
        ignore: the label value of unlabelled voxels; None: there is none.
        also_ignored: further label values of unlabelled voxels; they are read as `ignore`.
    """

    kind: ClassVar[str]
    family: ClassVar[Family]
    per_voxel: ClassVar[bool]
    answers_classes: ClassVar[bool] = False
    exclusive: ClassVar[bool]
    can_swap_labels: ClassVar[bool] = False
    default_loss: ClassVar[str]
    monitored: ClassVar[MonitoredMetric]
    output_meaning: ClassVar[str]
    calibrated: ClassVar[bool] = False
    unbounded: ClassVar[bool] = False
    mean_of_outputs: ClassVar[bool] = True
    labels_in_mm: ClassVar[bool] = False
    loss_kinds: ClassVar[tuple[str, ...]] = ()
    names: tuple[str, ...]
    ignore: int | None = None
    also_ignored: tuple[int, ...] = ()

    @property
    def outside(self) -> float:
        """The value of an answer where the input is empty, and the network sees nothing."""
        return 0.0

    @classmethod
    def from_plain(cls, content: Any) -> Self:
        """The inverse of `plain`, for kinds below this class; the content may be untrusted.

        Raises:
            ValueError: another kind, or invalid.
        """
        # the file may hold anything, such as a list for `kind`; a kind of a package needs the package
        kind = content.get("kind") if isinstance(content, Mapping) else None
        # one module is loaded, not those of all kinds
        entry = None
        if isinstance(kind, str):
            entry = KINDS.get(kind) or doors.mapping(doors.TARGETS).get(kind)
        targets = doors.load(entry) if entry else None
        if targets is None or not issubclass(targets, cls):
            fitting = [name for name, other in all_kinds().items() if issubclass(other, cls)]
            raise ValueError(f"the kind of targets must be one of {', '.join(fitting)}, got {kind!r:.40}")
        of_kind: Self = targets.from_fields(content)
        return of_kind

    @classmethod
    @abstractmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        """From the content of `plain`, which may be untrusted.

        Raises:
            ValueError: invalid.
        """

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """As plain types, with the key `kind`, for YAML, JSON and checkpoints."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Outputs of the network."""

    @property
    def description(self) -> str:
        """What two networks must share so that their outputs can be averaged, for messages."""
        return f"{self.kind}: {', '.join(self.names)}"

    def distinguishes(self, first_value: int, second_value: int) -> bool:
        """Whether two label values mean different things."""
        return True

    @property
    def of_table(self) -> Targets | None:
        """Those of the table that `predict` writes, also beside label maps; None: it writes none."""
        return None

    def fitted(self, values: np.ndarray) -> Self:
        """A copy with the statistics of the image-level labels of the training cases, (cases, values)."""
        return self

    def class_counts(self, values: np.ndarray) -> list[int] | None:
        """Number of cases of each class or label; None: does not apply. Shape: (cases, values)."""
        return None

    def output_counts(self, values: np.ndarray) -> list[int] | None:
        """Number of cases in which each output is 1; None: does not apply. Shape: (cases, values)."""
        return self.class_counts(values)

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        """Whether a split has the cases that it needs; returns a warning or None. Shape: (cases, values).

        Raises:
            ValueError: a class is missing.
        """
        return None

    def balanced_groups(self, values: np.ndarray) -> list[np.ndarray]:
        """Indices of the cases of each class, to draw each class equally often. Shape: (cases, values).

        Raises:
            ValueError: there are no classes to draw.
        """
        raise ArgumentError(
            "balanced_sampling",
            f"=true, as sampler=balanced, draws each class equally often, but this dataset has {self.kind} "
            "targets",
        )

    @property
    def default_columns(self) -> tuple[str, ...]:
        """The columns of a table of labels, if the user names none; label maps have none."""
        return ()

    def cells_per_name(self, values: Sequence[float]) -> list[str]:
        """A case's values as text, a cell for each name; label maps have none."""
        return ["-"] * len(self.names)

    @property
    def output_names(self) -> tuple[str, ...]:
        """What each output stands for; of label maps without the background."""
        return self.names

    def model(self, node: dict[str, Any]) -> dict[str, Any]:
        """The `model` node of a config, of a network with these outputs."""
        return node

    def finish(self, network: nn.Module) -> nn.Module:
        """Add what `decode` expects of the network, such as a layer that scales to the units of numbers."""
        return network

    @property
    @abstractmethod
    def scores(self) -> Scores:
        """How answers are scored, from validation to cross-validation."""

    @abstractmethod
    def encode(self, label: Tensor) -> Tensor:
        """A batch of labels in the form in which samples are mixed and resized, before `compare`."""

    @abstractmethod
    def random_labels(self, batch: int, patch_size: Sequence[int]) -> Tensor:
        """A batch of random labels, to measure the speed of steps."""

    @abstractmethod
    def compare(self, loss: Any, outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            loss: (outputs, reference) -> scalar.
            encoded: from `encode`.
            annotated: (batch, outputs) bool, for label maps: outputs that a sample has a reference for; None:
                all.
        A kind whose cases have values beside a label map also takes `values`, (batch, values).
        """

    def try_loss(self, loss: Any, spatial_dims: int) -> str | None:
        """Try a loss on random numbers.

        Returns:
            Why it does not fit; None: it fits.
        Raises:
            Exception: any error of the loss.
        """
        size = (TRIAL_EDGE,) * spatial_dims
        encoded = self.encode(self.random_labels(2, size))
        value = self.compare(loss, torch.randn(2, self.num_outputs, *size), encoded)
        if value.ndim or not value.isfinite():
            return f"gives {value.tolist()!s:.40} for {self.kind} targets, expected one finite number"
        return None


def all_kinds() -> dict[str, type[Targets]]:
    """Every kind of targets by its name, loaded."""
    entries = {**KINDS, **doors.mapping(doors.TARGETS)}
    return {name: doors.load(entry) for name, entry in entries.items()}


def names_of(content: Any) -> tuple[str, ...]:
    """Names from an untrusted file.

    Raises:
        ValueError: not a list of different names.
    """
    if not isinstance(content, (list, tuple)):
        raise ValueError("expected a list")
    are_names = all(isinstance(name, str) and name.strip() for name in content)
    if not are_names or len(set(content)) < len(content):
        raise ValueError(f"class names must differ from each other and not be blank, got {content!r:.200}")
    return tuple(content)


def finite_number(text: str) -> float | None:
    """The number that a cell of a table holds; None if it holds none, or one that is not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def label_values(content: Any) -> list[int]:
    """Label values from an untrusted file.

    Raises:
        ValueError: other than whole numbers in range.
    """
    if not isinstance(content, (list, tuple)):
        raise ValueError("expected a list")
    values = list(content)
    # `type`, as True and False are of class int
    if not all(type(value) is int and 1 <= value <= HIGHEST for value in values):
        raise ValueError(f"label values must be whole numbers from 1 to {HIGHEST}")
    return values
