"""MONAI's dictionary transforms with `CacheDataset`, by the line protocol of `serving`; in medconv's own
environment.

    PYTHONPATH=scripts python -m benchmarks.peers.monai_data --mode loader --raw DATASET --scratch FOLDER ...

Made as fast as its documentation knows how: whole volumes cached in memory without copying, indices of
foreground voxels found once, plain tensors instead of `MetaTensor`, one worker. It reads nothing in a turn,
where the others read files. Probabilities and ranges are those of nnU-Net 2.8.1 for an image of one channel
(see `benchmarks.peers.nnunet_data`). What differs: labels by nearest neighbour; the patch is not enlarged
before a rotation, so corners come in as zeros; rotation and zoom are two resamplings where both happen.
Source: https://docs.monai.io/en/1.6.1/transforms.html#dictionary-transforms
"""

from __future__ import annotations

import argparse
import math
from itertools import cycle
from typing import Any

from benchmarks.peers import serving

BOTH = ("image", "label")


def main() -> None:
    serving.one_thread()
    options = serving.parse(__doc__)
    channel = serving.own_stdout()
    import monai
    import torch

    torch.set_num_threads(1)
    monai.utils.set_determinism(0)
    prepared, cropped, augmented = _prepared(options), _cropped(options), _augmented()
    cases = monai.data.CacheDataset(
        serving.files(options.raw),
        monai.transforms.Compose([*prepared, *cropped, *(augmented if options.mode == "loader" else [])]),
        num_workers=None,
        copy_cache=False,
        progress=False,
    )
    serving.pin(options.core)
    name = f"MONAI {monai.__version__}"
    if options.mode == "loader":
        serving.serve(
            channel, name, serving.pulling(_batches(cases, options), lambda batch: len(batch["image"]))
        )
    else:
        numbers = cycle(range(len(cases)))
        work = serving.Transforming(lambda: cases[next(numbers)][0], monai.transforms.Compose(augmented))
        serving.serve(channel, name, work, work.fresh)


def _batches(cases: Any, options: argparse.Namespace) -> Any:
    """Endless batches from one persistent worker."""
    from monai.data import DataLoader
    from torch.utils.data import RandomSampler

    order = RandomSampler(cases, replacement=True, num_samples=10**6)
    return iter(DataLoader(cases, batch_size=options.batch, sampler=order, num_workers=1, prefetch_factor=2))


def _prepared(options: argparse.Namespace) -> list[Any]:
    """The deterministic part, whose result is cached."""
    import monai.transforms as mt
    import torch

    return [
        mt.LoadImaged(BOTH, ensure_channel_first=True),
        mt.NormalizeIntensityd("image"),
        mt.SpatialPadd(BOTH, options.patch),
        mt.EnsureTyped("image", dtype=torch.float32, track_meta=False),
        mt.EnsureTyped("label", dtype=torch.uint8, track_meta=False),
        mt.FgBgToIndicesd("label"),
    ]


def _cropped(options: argparse.Namespace) -> list[Any]:
    import monai.transforms as mt

    share = serving.FOREGROUND_SHARE
    known: dict[str, Any] = {"fg_indices_key": "label_fg_indices", "bg_indices_key": "label_bg_indices"}
    return [
        mt.RandCropByPosNegLabeld(
            BOTH, "label", options.patch, pos=share, neg=1 - share, num_samples=1, **known
        ),
        mt.SelectItemsd(BOTH),
    ]


def _augmented() -> list[Any]:
    import monai.transforms as mt

    angle, modes = math.radians(30), ("bilinear", "nearest")
    turn: dict[str, Any] = {f"range_{axis}": angle for axis in "xyz"}
    blur: dict[str, Any] = {f"sigma_{axis}": (0.5, 1.0) for axis in "xyz"}
    return [
        mt.RandRotated(BOTH, prob=0.2, **turn, mode=modes, padding_mode="zeros"),
        mt.RandZoomd(
            BOTH,
            prob=0.2,
            min_zoom=1 / 1.4,
            max_zoom=1 / 0.7,
            mode=("trilinear", "nearest"),
            padding_mode="constant",
        ),
        mt.RandGaussianNoised("image", prob=0.1, std=0.1, sample_std=True),
        mt.RandGaussianSmoothd("image", prob=0.2 * 0.5, **blur),
        mt.RandScaleIntensityd("image", prob=0.15, factors=0.25),
        mt.RandScaleIntensityFixedMeand("image", prob=0.15, factors=0.25, preserve_range=True),
        mt.RandSimulateLowResolutiond(
            "image", prob=0.25 * 0.5, zoom_range=(0.5, 1.0), downsample_mode="nearest-exact"
        ),
        mt.RandAdjustContrastd("image", prob=0.1, gamma=(0.7, 1.5), invert_image=True, retain_stats=True),
        mt.RandAdjustContrastd("image", prob=0.3, gamma=(0.7, 1.5), retain_stats=True),
        *(mt.RandFlipd(BOTH, prob=0.5, spatial_axis=axis) for axis in range(3)),
    ]


if __name__ == "__main__":
    main()
