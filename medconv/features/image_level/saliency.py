"""Saliency maps: which places of an image support a network's output. Grad-CAM by MONAI, and pictures of it.

Works on a copy of the network, so that no hook, gradient or changed layer remains in it.
Source: Selvaraju et al. 2017, arXiv:1610.02391.
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from monai.visualize import GradCAM
from torch import Tensor, nn

from medconv.features.pictures import drawing

# Positions of the preferred layer's output along each axis.
_MIN_SIZE = 4


def saliency(network: nn.Module, image: Tensor, target: Sequence[int] | int | None = None) -> np.ndarray:
    """How much each voxel supports an output, from 0 to 1, its maximum; all 0 if no voxel supports it.

    The map is that of the last layer with at least four positions along each axis, interpolated to the image.
    Shape: (batch, channels, *spatial) -> (batch, *spatial) float32.

    Args:
        target: index of the output, one for all images or one for each; None: the highest output of each. In
            regression, the map shows what makes the number larger.
    Raises:
        ValueError: no layer whose output has the image's axes.
    """
    with torch.inference_mode(False), torch.enable_grad():
        network = _differentiable_copy(network)
        # A copy, since inference tensors cannot have gradients.
        image = image.detach().clone().to(_dtype(network)).requires_grad_()
        layer = _layer(network, image[:1])
        # MONAI's own post-processing scales each map by its range; 0 must stay 0.
        cam = GradCAM(nn_module=network, target_layers=layer, postprocessing=lambda maps: maps)
        targets = _targets(network, image, target)
        # One by one, since MONAI mixes the maps of a batch.
        maps = [cam(single[None], class_idx=index) for single, index in zip(image, targets, strict=True)]
    return _scaled(torch.cat(maps)[:, 0].detach().float().cpu().numpy())


def overlay(
    network: nn.Module, image: Tensor, spacing_mm: Sequence[float], target: int | None = None
) -> np.ndarray:
    """One image with its map beside it, in planes through the map's maximum.

    Shape: (channels, *spatial) -> (height, width, 3) uint8.

    Args:
        spacing_mm: of each axis.
        target: as of `saliency`.
    """
    heat = saliency(network, image[None], target)[0]
    return drawing.heat(image.detach().float().cpu().numpy(), heat, spacing_mm)


def _differentiable_copy(network: nn.Module) -> nn.Module:
    copy = deepcopy(network).eval()
    for module in copy.modules():
        # It would overwrite the activations that Grad-CAM needs.
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return copy


def _dtype(network: nn.Module) -> torch.dtype:
    """The type of the parameters."""
    for parameter in network.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def _targets(network: nn.Module, image: Tensor, target: Sequence[int] | int | None) -> list[int]:
    """The index of the output of each image."""
    if target is None:
        with torch.no_grad():
            return list(network(image).argmax(1).tolist())
    if isinstance(target, int):
        return [target] * len(image)
    return [int(index) for index in target]


def _layer(network: nn.Module, image: Tensor) -> str:
    """The last layer whose output still has spatial positions, and which is called once: it has one map."""
    calls = _outputs_of_layers(network, image)
    counts = Counter(name for name, _ in calls)
    sizes = {
        name: output.shape[2:]
        for name, output in calls
        if counts[name] == 1 and isinstance(output, Tensor) and output.ndim == image.ndim
    }
    for positions in (_MIN_SIZE, 2):
        for name, size in reversed(sizes.items()):
            # An axis of the image may be shorter itself.
            axes = zip(size, image.shape[2:], strict=True)
            if all(length >= min(positions, image_length) for length, image_length in axes):
                return name
    raise ValueError("saliency needs a layer whose output has the image's axes, and this network has none")


def _outputs_of_layers(network: nn.Module, image: Tensor) -> list[tuple[str, Any]]:
    """Name and output of each call of a layer, in order."""
    calls: list[tuple[str, Any]] = []
    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=name: calls.append((name, output)))
        for name, module in network.named_modules()
        if name
    ]
    with torch.no_grad():
        network(image)
    for handle in handles:
        handle.remove()
    return calls


def _scaled(maps: np.ndarray) -> np.ndarray:
    """Divided by the maximum of each map. Shape: (batch, *spatial)."""
    maps = np.nan_to_num(maps, nan=0.0, posinf=0.0)
    spatial_axes = tuple(range(1, maps.ndim))
    highest = maps.max(spatial_axes, keepdims=True)
    scaled: np.ndarray = np.divide(maps, highest, out=np.zeros_like(maps), where=highest > 0)
    return scaled
