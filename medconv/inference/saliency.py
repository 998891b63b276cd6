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

from medconv.metrics import visualization

_MIN_SIZE = 4  # of the preferred layer's output along each axis


def saliency(network: nn.Module, image: Tensor, target: Sequence[int] | int | None = None) -> np.ndarray:
    """How much each voxel supports an output, from 0 to 1, its maximum; all 0 if no voxel supports it.

    The map is that of the last layer with at least four positions along each axis, interpolated to the image.
    Shape: (batch, channels, *spatial) -> (batch, *spatial) float32.
    Args: target: index of the output, one for all images or one for each; None: the highest output of
        each. In regression, the map shows what makes the number larger.
    Raises: ValueError: no layer whose output has the image's axes.
    """
    with torch.inference_mode(False), torch.enable_grad():
        copy = deepcopy(network).eval()
        for module in copy.modules():
            if getattr(module, "inplace", False):  # it would overwrite the activations that Grad-CAM needs
                module.inplace = False  # type: ignore[assignment]
        dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
        image = image.detach().clone().to(dtype).requires_grad_()
        layer = _layer(copy, image[:1])
        cam = GradCAM(nn_module=copy, target_layers=layer, postprocessing=lambda maps: maps)
        if target is None:
            with torch.no_grad():
                target = copy(image).argmax(1).tolist()
        targets = [target] * len(image) if isinstance(target, int) else [int(number) for number in target]
        # One by one, since MONAI mixes the maps of a batch.
        maps = [cam(single[None], class_idx=index) for single, index in zip(image, targets, strict=True)]
    return _scaled(torch.cat(maps)[:, 0].detach().float().cpu().numpy())


def overlay(
    network: nn.Module, image: Tensor, spacing_mm: Sequence[float], target: int | None = None
) -> np.ndarray:
    """One image with its map beside it, in planes through the map's maximum. Shape: (channels,
    *spatial) -> (height, width, 3) uint8. Args: spacing_mm: of each axis."""
    heat = saliency(network, image[None], target)[0]
    return visualization.heat(image.detach().float().cpu().numpy(), heat, spacing_mm)


def _layer(network: nn.Module, image: Tensor) -> str:
    """The last layer whose output still has spatial positions, and which is called once: it has one map."""
    seen: list[tuple[str, Any]] = []
    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=name: seen.append((name, output)))
        for name, module in network.named_modules()
        if name
    ]
    with torch.no_grad():
        network(image)
    for handle in handles:
        handle.remove()
    calls = Counter(name for name, _ in seen)
    outputs = {n: o for n, o in seen if calls[n] == 1 and isinstance(o, Tensor) and o.ndim == image.ndim}
    sizes = {name: output.shape[2:] for name, output in outputs.items()}
    for minimum in (_MIN_SIZE, 2):
        least = [min(minimum, n) for n in image.shape[2:]]
        for name, size in reversed(sizes.items()):
            if all(n >= m for n, m in zip(size, least, strict=True)):
                return name
    raise ValueError("saliency needs a layer whose output has the image's axes, and this network has none")


def _scaled(maps: np.ndarray) -> np.ndarray:
    maps = np.nan_to_num(maps, nan=0.0, posinf=0.0)
    highest = maps.reshape(len(maps), -1).max(1).reshape(-1, *(1,) * (maps.ndim - 1))
    scaled: np.ndarray = np.divide(maps, highest, out=np.zeros_like(maps), where=highest > 0)
    return scaled
