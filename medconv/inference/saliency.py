"""Where in an image a network's answer comes from: Grad-CAM maps, by MONAI, and pictures of them.

Works on a copy of the network, so that no hook, gradient or changed layer is left behind.
Source: Selvaraju et al. 2017, arXiv:1610.02391.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from monai.visualize import GradCAM
from torch import Tensor, nn

from medconv.utils import visualization

_LEAST = 4  # places along each axis that a map has, at least, where the network has such a layer


def saliency(network: nn.Module, image: Tensor, target: Sequence[int] | int | None = None) -> np.ndarray:
    """What speaks for an output, from 0 to 1, the place that speaks most being 1; all 0 where nothing does.

    The map is that of the last layer with at least four places along each axis, enlarged to the image.
    Shape: (batch, channels, *spatial) -> (batch, *spatial) float32.
    Args: target: number of the output, one for all or one for each; None: the highest one of each. Of a
        number it is what makes it larger.
    Raises: ValueError: no layer whose output has the image's axes.
    """
    with torch.inference_mode(False), torch.enable_grad():
        copy, image = _copied(network), image.detach().clone().to(_dtype(network)).requires_grad_()
        layer = _layer(copy, image[:1])
        cam = GradCAM(nn_module=copy, target_layers=layer, postprocessing=lambda found: found)
        if target is None:
            with torch.no_grad():
                target = copy(image).argmax(1).tolist()
        targets = [target] * len(image) if isinstance(target, int) else [int(number) for number in target]
        maps = [
            cam(one[None], class_idx=number) for one, number in zip(image, targets, strict=True)
        ]  # it mixes a batch's
    return _scaled(torch.cat(maps)[:, 0].detach().float().cpu().numpy())


def overlay(
    network: nn.Module, image: Tensor, spacing_mm: Sequence[float], target: int | None = None
) -> np.ndarray:
    """One image with its map beside it, in planes through the map's highest place. Shape: (channels,
    *spatial) -> (height, width, 3) uint8. Args: spacing_mm: of each axis."""
    found = saliency(network, image[None], target)[0]
    return visualization.heat(image.detach().float().cpu().numpy(), found, spacing_mm)


def _copied(network: nn.Module) -> nn.Module:
    copy = deepcopy(network).eval()
    for module in copy.modules():
        if getattr(module, "inplace", False):  # what Grad-CAM looks at must not be written over
            module.inplace = False  # type: ignore[assignment]
    return copy


def _dtype(network: nn.Module) -> torch.dtype:
    return next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)


def _layer(network: nn.Module, image: Tensor) -> str:
    """The last layer that still knows where it looks. One that is used several times has several maps, and
    is none.
    """
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
    names = [name for name, _ in seen]
    once = [(n, o) for n, o in seen if names.count(n) == 1 and isinstance(o, Tensor) and o.ndim == image.ndim]
    sizes = {name: output.shape[2:] for name, output in once}
    for least in (_LEAST, 2):
        found = [
            n
            for n, size in sizes.items()
            if all(s >= min(least, i) for s, i in zip(size, image.shape[2:], strict=True))
        ]
        if found:
            return found[-1]
    raise ValueError("saliency needs a layer whose output has the image's axes, and this network has none")


def _scaled(maps: np.ndarray) -> np.ndarray:
    maps = np.nan_to_num(maps, nan=0.0, posinf=0.0)
    highest = maps.reshape(len(maps), -1).max(1).reshape(-1, *(1,) * (maps.ndim - 1))
    return np.divide(maps, highest, out=np.zeros_like(maps), where=highest > 0)
