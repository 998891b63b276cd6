"""TensorBoard pictures: of training samples, of validation cases beside their references, and of kernels."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from medconv.convs.parametrization import TRANSPOSED
from medconv.data.loading.patch import Batch
from medconv.features.pictures.drawing import overlay
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets

Picture = tuple[str, np.ndarray]  # a tag, and (height, width, 3) uint8


class ImageLogger(Callback):
    """Logs images to TensorBoard: the first augmented training samples, and validation cases.

    A validation case of segmentation is shown with its reference and prediction. For image-level targets
    each validation logs plots over all cases (ROC curves and the like). The end of training logs the worst
    cases of the last validation: those of the lowest Dice, or saliency maps of those with the largest error.

    Args:
        spacing_mm: of the training samples.
        cases: how many samples and cases to show, from rank 0.
    """

    def __init__(self, spacing_mm: Sequence[float], cases: int = 3) -> None:
        self.spacing_mm = tuple(spacing_mm)
        self.cases = cases
        self._num_samples = 0  # shown so far
        self._views: CaseViews | None = None  # of the last validation; None: only the sanity check was
        self.shows_predictions = True  # a validation then keeps what it predicted; see `Task`

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows the batches of the first optimizer step, as the network got them."""
        num_left = self.cases - self._num_samples
        is_first_step = trainer.fit_loop.total_batch_idx < trainer.accumulate_grad_batches
        if num_left <= 0 or not is_first_step or not trainer.is_global_zero:
            return
        views = views_of(pl_module.targets, self.cases, self.spacing_mm)
        growing = getattr(pl_module, "growing_patch", None)
        if growing is not None:
            batch = growing(batch, progress=0.0)
        images = batch["image"][:num_left]
        labels = batch["label"][:num_left]
        numbers = map(int, batch["sample"])
        for image, label, number in zip(images, labels, numbers, strict=False):
            self._num_samples += 1
            first_channel = image[0].float().cpu().numpy()
            self._show(trainer, 0, [views.sample(first_channel, label, number)])

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._views = views_of(pl_module.targets, self.cases, self.spacing_mm)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._views is not None and trainer.is_global_zero:
            self._show(trainer, trainer.global_step, self._views.validated(batch, outputs))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._views is None or not trainer.is_global_zero or not pl_module.rows:
            return
        all_boards = boards(trainer)
        if not all_boards:
            return
        pictures, text = self._views.ended(pl_module.rows)
        self._show(trainer, trainer.global_step, pictures)
        if text:
            for board in all_boards:
                board.experiment.add_text("val/scores", text, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Logs the worst cases here, since the averaged weights that were validated are in place again."""
        if self._views is not None and boards(trainer):
            self._show(trainer, trainer.global_step, self._views.worst(pl_module))

    @staticmethod
    def _show(trainer: Trainer, step: int, pictures: Iterable[Picture]) -> None:
        for tag, picture in pictures:
            for board in boards(trainer):
                board.experiment.add_image(f"images/{tag}", picture, step, dataformats="HWC")


def views_of(targets: Targets, cases: int, spacing_mm: Sequence[float]) -> "CaseViews":
    """The views for a kind of targets.

    Args:
        cases: how many to show at most.
        spacing_mm: of the training samples.
    """
    own_views = targets.family.own("views")
    if own_views:
        views: CaseViews = own_views(targets, cases, spacing_mm)
        return views
    assert isinstance(targets, SegmentationTargets)
    return LabelMapViews(targets, cases, spacing_mm)


class CaseViews(Protocol):
    """The pictures of a validation; a new object for each."""

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        """A training sample. Shape: image (*spatial), label as in a batch."""

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        """A validated batch. Args: predicted: what the validation returned."""

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        """Plots and a text about all cases, from the rows of `validation`."""

    def worst(self, module: Any) -> Iterator[Picture]:
        """The worst cases, when training has ended."""


@dataclass(frozen=True)
class _LowDice:
    """A case of segmentation with its mean Dice, by which cases are sorted."""

    dice: float
    case: str
    picture: np.ndarray


class LabelMapViews:
    """The first validation cases, and those with the lowest Dice, with reference and prediction."""

    def __init__(self, targets: SegmentationTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets = targets
        self.cases = cases
        self.spacing_mm = spacing_mm
        self._num_shown = 0  # cases so far
        self._worst: list[_LowDice] = []  # lowest first

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        labels = {"label": self.targets.label_map(label)}
        return f"train/sample {number}", self._picture(image, labels, self.spacing_mm)

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        is_first = self._num_shown < self.cases
        dice = predicted["dice"]
        # Undefined without reference and prediction
        has_room = len(self._worst) < self.cases
        is_among_worst = dice is not None and (has_room or dice < self._worst[-1].dice)
        if not (is_first or is_among_worst):
            return
        image = batch["image"][0, 0].float().cpu().numpy()
        reference = self.targets.label_map(batch["label"][0])
        labels = {"reference": reference, "prediction": predicted["prediction"]}
        picture = self._picture(image, labels, batch["spacing_mm"])
        if is_among_worst:
            # Drawn now: a picture takes far less memory than its case
            worst = [*self._worst, _LowDice(dice, predicted["case"], picture)]
            self._worst = sorted(worst, key=lambda case: case.dice)[: self.cases]
        if is_first:
            self._num_shown += 1
            yield f"val/{predicted['case']}", picture

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        return [], ""

    def worst(self, module: Any) -> Iterator[Picture]:
        for case in self._worst:
            yield f"worst/{case.case} (Dice {case.dice:.3f})", case.picture

    def _picture(
        self, image: np.ndarray, labels: Mapping[str, Tensor], spacing_mm: Sequence[float]
    ) -> np.ndarray:
        """The image beside its label maps. Args: labels: by title."""
        arrays = [label.cpu().numpy().astype(np.int16) for label in labels.values()]
        ignore = self.targets.ignore
        if ignore is not None:  # such voxels are not painted
            arrays = [np.where(array == ignore, 0, array) for array in arrays]
        titles = ["image", *labels]
        return overlay(image, arrays, spacing_mm, titles=titles, names=self.targets.value_names)


_COMPILED = "_orig_mod."  # torch.compile's part of a module's name
_BLUE = np.array([33, 102, 172], float)
_RED = np.array([178, 24, 43], float)
_GREY = 170  # of the frame of a slice
_SLICE_PIXELS = 48  # minimum of a slice's longer side
_GAP_PIXELS = 8  # between kernels
_MAX_ROWS = 4  # output channels
_MAX_COLUMNS = 4  # input channels


class KernelLogger(Callback):
    """Logs kernels of the first, a middle and the last spatial convolution, before training and at each
    validation, where weight averaging has put the averaged weights in place.

    A kernel is that with which the layer convolves, also if `conv` computes it from other parameters. A class
    that is no `nn.Conv` is shown if its `weight` is such a kernel, (out, in, *kernel_size).
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        # A checkpoint of step 0 is older than this picture: the run that resumes from it draws it again
        if trainer.global_step == 0:
            self._log(trainer, pl_module.network)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, pl_module.network)

    @staticmethod
    def _log(trainer: Trainer, network: nn.Module) -> None:
        all_boards = boards(trainer)
        # One rank alone must not gather sharded weights: it would wait for the others
        is_sharded = any(isinstance(parameter, DTensor) for parameter in network.parameters())
        if not all_boards or is_sharded or not trainer.is_global_zero:
            return
        for name, conv in _shown_convs(network).items():
            with torch.no_grad():
                # A copy: FSDP frees the storage of gathered weights, and cannot while an array looks at it
                weight = conv.weight.detach().to("cpu", torch.float32, copy=True).numpy()
            picture = kernel_picture(weight)
            for board in all_boards:
                board.experiment.add_image(f"kernels/{name}", picture, trainer.global_step, dataformats="HWC")


def _shown_convs(network: nn.Module) -> dict[str, Any]:
    """By name: the first, a middle and the last convolution with more than one tap."""
    convs = {
        name.replace(_COMPILED, ""): module
        for name, module in network.named_modules()
        if _is_spatial_conv(module)
    }
    names = list(convs)
    indices = sorted({0, len(names) // 2, len(names) - 1}) if names else []
    return {names[index]: convs[names[index]] for index in indices}


def _is_spatial_conv(module: nn.Module) -> bool:
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):  # not by its weight, which may have to be computed
        return max(module.kernel_size) > 1
    weight = None if isinstance(module, TRANSPOSED) else getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim in (4, 5) and max(weight.shape[2:]) > 1


def kernel_picture(weight: np.ndarray) -> np.ndarray:
    """One row per output channel, one column per input channel, at most four of each, evenly spaced.

    The slices of a 3D kernel along its last axis are side by side. All share one scale: the largest absolute
    weight shown.

    Shape: weight (out_channels, in_channels, *kernel), 2 or 3 kernel axes -> (height, width, 3) uint8.
    """
    kernels = weight[_evenly_spaced(weight.shape[0], _MAX_ROWS)][
        :, _evenly_spaced(weight.shape[1], _MAX_COLUMNS)
    ]
    largest = float(np.abs(kernels).max()) or 1.0
    rows = []
    for row in kernels / largest:
        rows.append(np.concatenate([_framed(kernel) for kernel in row], 1))
    return np.concatenate(rows, 0)


def _evenly_spaced(length: int, at_most: int) -> np.ndarray:
    return np.linspace(0, length - 1, min(length, at_most)).round().astype(int)


def _framed(kernel: np.ndarray) -> np.ndarray:
    """Shape: (rows, columns) or (rows, columns, slices), from -1 to 1 -> pixels."""
    slices = [kernel] if kernel.ndim == 2 else list(np.moveaxis(kernel, -1, 0))
    frame = ((1, 1), (1, 1), (0, 0))
    panels = [np.pad(_coloured(values), frame, constant_values=_GREY) for values in slices]
    gap = ((0, _GAP_PIXELS), (0, _GAP_PIXELS), (0, 0))
    return np.pad(np.concatenate(panels, 1), gap, constant_values=255)


def _coloured(values: np.ndarray) -> np.ndarray:
    strength = np.abs(values)[..., None]
    colour = np.where(values[..., None] > 0, _RED, _BLUE)
    pixels = (255 * (1 - strength) + colour * strength).astype(np.uint8)
    scale = -(-_SLICE_PIXELS // max(values.shape))  # rounded up
    return np.kron(pixels, np.ones((scale, scale, 1), np.uint8))


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The trainer's loggers to which pictures can be written."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
