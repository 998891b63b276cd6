"""TorchIO's transforms with its queue, by the line protocol of `serving`.

This script and its neighbour `serving.py` stand alone: they are run by the python of an environment that has
TorchIO, which need not have medconv.

    python3 -m venv FOLDER && FOLDER/bin/pip install torchio==1.2.1

Subjects are held in memory and patches are augmented after they have left the queue. TorchIO's documentation
augments whole
volumes instead, as it reads them: at a volume of 20 and a patch of 0.9 million voxels that costs several
times as much. Probabilities and ranges are those of nnU-Net 2.8.1 where TorchIO has the transform. It lacks:
brightness and contrast; gamma that keeps mean and deviation, and the inverted one (both are one plain gamma
of their joint probability); its low resolution is along one axis, as slices become thicker. Labels are
resampled by nearest neighbour, patches not enlarged.
Source: Pérez-García et al. 2021, doi:10.1016/j.cmpb.2021.106236; https://torchio.org, version 1.2.1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from importlib import metadata
from typing import Any

if __package__:
    from benchmarks.peers import serving
else:  # a script, run where medconv is not installed
    import serving  # type: ignore[no-redef]

SAMPLES_PER_VOLUME, VOLUMES_IN_QUEUE = 8, 3


def main() -> None:
    serving.one_thread()
    options = serving.parse(__doc__)
    serving.need("torchio", "TorchIO", "torchio==1.2.1")
    channel = serving.own_stdout()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    subjects = _subjects(options)
    serving.pin(options.core)
    name = f"TorchIO {metadata.version('torchio')}"
    if options.mode == "loader":
        batches = _batches(subjects, options)
        serving.serve(channel, name, serving.pulling(batches, lambda batch: len(batch["image"]["data"])))
    else:
        queue = _queue(subjects, options, workers=0)
        work = serving.Transforming(lambda: queue[0], _augmented())
        serving.serve(channel, name, work, work.fresh)


def _subjects(options: argparse.Namespace) -> Any:
    import torchio as tio

    prepare = tio.Compose([tio.ZNormalization(), _Padding(options.patch)])
    subjects = [
        prepare(tio.Subject(image=tio.ScalarImage(case["image"]), label=tio.LabelMap(case["label"])))
        for case in serving.files(options.raw)
    ]
    return tio.SubjectsDataset(subjects, load_getitem=False)


class _Padding:
    """To the patch where a volume is smaller, with 0 on both sides."""

    def __init__(self, patch: list[int]) -> None:
        self.patch = patch

    def __call__(self, subject: Any) -> Any:
        import torchio as tio

        return tio.CropOrPad([max(a, b) for a, b in zip(self.patch, subject.spatial_shape, strict=True)])(
            subject
        )


def _queue(subjects: Any, options: argparse.Namespace, workers: int) -> Any:
    import torchio as tio

    share = serving.FOREGROUND_SHARE
    sampler = tio.LabelSampler(options.patch, "label", {0: 1 - share, 1: share / 2, 2: share / 2})
    length = SAMPLES_PER_VOLUME * VOLUMES_IN_QUEUE
    return tio.Queue(subjects, length, SAMPLES_PER_VOLUME, sampler, num_workers=workers)


def _batches(subjects: Any, options: argparse.Namespace) -> Iterator[Any]:
    """The queue's own worker hands over volumes; its documentation wants the patches taken in the main
    process.
    """
    import torchio as tio

    queue, augment = _queue(subjects, options, workers=1), _augmented()
    collate = lambda patches: tio.utils.history_collate([augment(patch) for patch in patches])  # noqa: E731
    loader = tio.SubjectsLoader(queue, batch_size=options.batch, num_workers=0, collate_fn=collate)
    while True:
        yield from loader


def _augmented() -> Any:
    import torchio as tio

    zero = {"default_pad_value": 0}
    return tio.Compose(
        [
            tio.RandomAffine(scales=0, degrees=30, p=0.2, **zero),
            tio.RandomAffine(scales=(1 / 1.4, 1 / 0.7), degrees=0, isotropic=True, p=0.2, **zero),
            tio.RandomNoise(std=(0, 0.1), p=0.1),
            tio.RandomBlur(std=(0.5, 1.0), p=0.2 * 0.5),
            tio.RandomAnisotropy(downsampling=(1, 2), p=0.25 * 0.5),
            tio.RandomGamma(log_gamma=(math.log(0.7), math.log(1.5)), p=0.1 + 0.3 - 0.1 * 0.3),
            tio.RandomFlip(axes=(0, 1, 2), flip_probability=0.5),
        ]
    )


if __name__ == "__main__":
    main()
