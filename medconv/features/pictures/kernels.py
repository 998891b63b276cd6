"""TensorBoard pictures of kernels: what the convolutions have learned."""

from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from medconv.convs.parametrization import TRANSPOSED
from medconv.training.loggers.tensorboard import boards

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

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Step 0 alone does not say so: a run may resume from a checkpoint of its first batch
        if trainer.ckpt_path is None:
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
