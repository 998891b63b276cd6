"""A user's own transforms of MONAI or TorchIO, applied to each training sample in its loader worker."""

import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose, Randomizable
from monai.utils import convert_to_tensor
from torch import Tensor

from medconv.data.augmentation.spatial import mirrored_axes
from medconv.data.random_streams import RandomStream, generator
from medconv.utils.errors import ArgumentError, reason

Sample = dict[str, Any]
log = logging.getLogger(__name__)


class SampleTransforms(Compose):
    """Transforms of one sample, one after the other.

    A `Compose` whose random numbers depend on (seed, sample number) alone, so that workers and restarts do
    not change a sample.

    Args:
        transforms: MONAI's dictionary transforms or any functions of a dictionary: `image` (channels,
            *spatial) and, unless labels are image-level, `label` (1, *spatial). Those of TorchIO get a
            `Subject` with these two and the spacing. Other keys that they return are dropped.
        seed, spacing_mm, patch_size: as in `RandomParameters`.
        mirror_axes: spatial axes along which the transforms mirror samples, or `all`. Nothing here can find
            that out, and mirror test-time augmentation is refused along other axes.
        flip_label_pairs, left_right_axis: as in `Augment`; the transforms must swap these labels themselves.
    Raises:
        ValueError: not a list of functions, or wrong axes.
    """

    per_sample = True

    def __init__(
        self,
        transforms: Sequence[Callable[[Sample], Sample]],
        *,
        seed: int,
        spacing_mm: Sequence[float],
        patch_size: Sequence[int],
        mirror_axes: Sequence[int] | str = (),
        flip_label_pairs: Sequence[Sequence[int]] = (),
        left_right_axis: int | None = None,
    ) -> None:
        if not isinstance(transforms, (list, tuple)) or not all(map(callable, transforms)):
            raise ArgumentError(
                "transforms", f" must be a list of transforms, each with its _target_, got {transforms!r}"
            )
        super().__init__(transforms)
        self.seed = seed
        self.spacing_mm = tuple(spacing_mm)
        self.patch_size = tuple(patch_size)
        self.mirror_axes = mirrored_axes(mirror_axes, len(self.spacing_mm))
        if flip_label_pairs and left_right_axis is not None:
            log.warning(
                "augmentation: flip_label_pairs swaps no labels in these transforms; one that mirrors "
                "axis %d, from left to right, must swap them itself",
                left_right_axis,
            )

    def __call__(self, sample: Sample) -> Sample:  # type: ignore[override]
        """Transform a copy of a sample.

        Shape: image (channels, *patch_size) float32, label (1, *patch_size); sample: its number.
        Image-level labels (values,) are unchanged and not given to the transforms.
        Raises:
            ValueError: a transform raised an error or left out a key; another shape than before; labels that
                are not whole numbers.
        """
        image_level = sample["label"].ndim == 1
        keys = ("image",) if image_level else ("image", "label")
        data = {key: sample[key].clone() for key in keys}  # a dataset may keep its images in memory
        rng = generator(self.seed, RandomStream.TRANSFORMS, sample["sample"])
        own_seed, *global_seeds = rng.integers(2**32, size=5).tolist()
        self.set_random_state(own_seed)
        with _seeded(*global_seeds):
            for transform in self.transforms:
                data = self._apply(transform, data, keys)
        transformed = {key: self._plain(key, data[key], sample[key]) for key in keys}
        return {**sample, **transformed}

    def _apply(self, transform: Any, data: Sample, keys: Sequence[str]) -> Sample:
        name = getattr(transform, "__qualname__", type(transform).__name__)
        try:
            apply = partial(self._apply_torchio, transform) if _is_torchio(transform) else transform
            result = apply(data)
        except Exception as error:  # a user's code may raise anything
            raise ValueError(f"augmentation: {name} raised {_chain(error)}") from error
        if not isinstance(result, Mapping) or any(key not in result for key in keys):
            received = list(result) if isinstance(result, Mapping) else type(result).__name__
            raise ValueError(
                f"augmentation: {name} must return a dictionary with {', '.join(keys)}, got {received}"
            )
        return dict(result)

    def _apply_torchio(self, transform: Callable[[Any], Any], data: Sample) -> Sample:
        """Apply a transform of TorchIO. A slice is a volume with one voxel along its last axis."""
        torchio = sys.modules["torchio"]
        missing_axes = 3 - len(self.spacing_mm)
        affine = np.diag([*self.spacing_mm, *(1.0,) * (missing_axes + 1)])
        image_classes = {"image": torchio.ScalarImage, "label": torchio.LabelMap}
        images = {}
        for key, image_class in image_classes.items():
            if key in data:
                volume = convert_to_tensor(data[key])[(..., *(None,) * missing_axes)]
                images[key] = image_class(tensor=volume, affine=affine)
        result = transform(torchio.Subject(images))
        tensors = {key: result[key].data for key in image_classes if key in result}
        if missing_axes:
            return {key: tensor.squeeze(-1) for key, tensor in tensors.items()}
        return tensors

    def _plain(self, key: str, value: Any, before: Tensor) -> Tensor:
        """A contiguous tensor without MONAI's metadata, of the patch size and the type from before."""
        tensor = convert_to_tensor(value)
        expected = (len(before), *self.patch_size)
        shape = tuple(getattr(tensor, "shape", ()))
        if shape != expected:
            raise ValueError(
                f"augmentation: the transforms return {key} of shape {shape}, expected {expected}: channels, "
                "then the patch size"
            )
        typed: Tensor = tensor.to(before.dtype)
        changed = typed.to(tensor.dtype) != tensor
        # probabilities and heatmaps are rounded to half precision
        if key == "label" and not before.is_floating_point() and changed.any():
            raise ValueError(
                f"augmentation: the transforms return label value {tensor[changed][0].item():g}, expected "
                f"whole numbers up to {torch.iinfo(before.dtype).max}; move labels by mode `nearest`"
            )
        return typed


@contextmanager
def _seeded(torch_seed: int, numpy_seed: int, python_seed: int, monai_seed: int) -> Iterator[None]:
    """Inside, one thread, and global random numbers of the CPU from these seeds; afterwards both as before.

    TorchIO draws from torch's. `Randomizable.R` serves MONAI's transforms that a user's own class holds, as
    `set_random_state` does not reach them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader worker: the last bit of a sum depends on their number
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    monai_state = Randomizable.R.get_state()
    torch.default_generator.manual_seed(torch_seed)  # `torch.manual_seed` would also seed GPUs
    np.random.seed(numpy_seed)
    random.seed(python_seed)
    Randomizable.R.seed(monai_seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        Randomizable.R.set_state(monai_state)


def _is_torchio(transform: Any) -> bool:
    """Without importing the package: who has a transform of it has imported it."""
    torchio = sys.modules.get("torchio")
    return torchio is not None and isinstance(transform, torchio.Transform)


def _chain(error: BaseException) -> str:
    """The error on one line; one of MONAI's `Compose` has the actual error as its cause."""
    line = f"{type(error).__name__}: {reason(error)}"
    if error.__cause__ is None:
        return line
    return f"{line}, from {_chain(error.__cause__)}"
