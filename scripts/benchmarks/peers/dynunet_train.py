"""MONAI's DynUNet in a plain torch loop, as a contestant of the recipe benchmark (see `training`).

    PYTHONPATH=scripts python -m benchmarks.peers.dynunet_train PART JOB

As MONAI's tutorials of 3D segmentation have it (spleen, BTCV): `CacheDataset`, crops half of which are
centred on foreground, flips and a shift of the intensity by chance, `DiceCELoss`, AdamW, whole images by
`SlidingWindowInferer` and `Invertd`. In fp32, as their mixed precision is for CUDA. Four patches a batch; the
learning rate falls along a cosine over the budget. What no tutorial settles, spacing, patch, strides and
channels, is what our plan gives any model. Filling the cache does not count.
Source: https://github.com/Project-MONAI/tutorials (3d_segmentation),
https://docs.monai.io/en/1.6.1/networks.html#dynunet
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import training

if TYPE_CHECKING:
    from monai.networks.nets import DynUNet

BOTH = ("image", "label")
CASES, CROPS = 2, 2  # a batch: so many cases, and so many patches of each
LEARNING_RATE = 1e-3


def prepare(job: training.Job) -> None:
    """Only the plan: MONAI keeps its prepared data in memory."""
    path = Path(job.prepared) / "plan.json"
    if path.is_file():
        return
    from hydra import compose, initialize_config_dir

    from medconv import config
    from medconv.training import data_setup

    data = [
        "data=auto",
        f"data.root='{job.root}'",
        f"data.cache_dir='{job.prepared}'",
        f"data.splits_file='{job.splits}'",
    ]
    overrides = [*data, "trainer.accelerator=cpu"]
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        checked = config.validate(compose("train", overrides))
    path.write_text(json.dumps(asdict(data_setup.prepare_data(checked).derived)))


def train(job: training.Job) -> None:
    """From its first step until none fits into the budget any more."""
    import monai
    import torch
    from monai.losses import DiceCELoss

    monai.utils.set_determinism(job.seed)
    torch.set_num_threads(job.threads)
    plan = _plan(job)
    network, loader = build(plan), _loader(job, plan)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=1e-5)
    clock = training.Clock(job.seconds)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: (1 + math.cos(math.pi * clock.share)) / 2
    )
    snapshots, steps = training.Snapshots(job, clock), 0
    clock.start()
    for batch in (batch for _ in repeat(None) for batch in loader):
        if not clock.fits():
            break
        optimizer.zero_grad()
        criterion(network(batch["image"]), batch["label"]).backward()
        optimizer.step()
        schedule.step()
        steps += 1
        snapshots.after_step(steps, lambda path: torch.save(network.state_dict(), path))
    about = {
        "name": f"MONAI {monai.__version__} DynUNet, plain loop",
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "patch_size": plan["patch_size"],
        "batch_size": CASES * CROPS,
        "precision": "float32",
        "torch": torch.__version__,
    }
    snapshots.finish(steps, lambda path: torch.save(network.state_dict(), path), **about)


def predict(job: training.Job) -> None:
    import monai.transforms as mt
    import torch
    from monai.inferers import SlidingWindowInferer

    from medconv.data.io.writing import write_label

    torch.set_num_threads(job.threads)
    plan = _plan(job)
    network, read = build(plan).eval(), mt.Compose(_read(plan, ("image",)))
    window = SlidingWindowInferer(plan["patch_size"], sw_batch_size=4, overlap=0.5, mode="gaussian")
    back = mt.Compose(
        [mt.Invertd("logits", read, "image", nearest_interp=False), mt.AsDiscreted("logits", argmax=True)]
    )
    files = _files(job)
    for file, folder, cases in training.missing(job):
        network.load_state_dict(torch.load(file, weights_only=True))
        for case in cases:
            sample = read({"image": files[case]["image"]})
            with torch.inference_mode():
                sample["logits"] = window(sample["image"][None], network)[0]
            label = back(sample)["logits"][0].numpy().astype("int16")
            write_label(folder / f"{case}.nii.gz", label, Path(files[case]["image"]))


def build(plan: dict[str, Any]) -> DynUNet:
    from monai.networks.nets import DynUNet

    return DynUNet(
        spatial_dims=plan["spatial_dims"],
        in_channels=plan["num_channels"],
        out_channels=plan["num_classes"],
        kernel_size=plan["kernel_sizes"],
        strides=plan["stage_strides"],
        upsample_kernel_size=plan["strides"],
        filters=plan["channels"],
    )


def _plan(job: training.Job) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((Path(job.prepared) / "plan.json").read_text())
    return plan


def _files(job: training.Job) -> dict[str, dict[str, str]]:
    from medconv.data.datasets.dataset_json import auto

    cases = auto(job.root).cases
    return {case.id: {"image": str(case.images[0]), "label": str(case.label)} for case in cases}


def _read(plan: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    """A case as the cache holds it."""
    import monai.transforms as mt

    modes = ["bilinear", "nearest"][: len(keys)]
    return [
        mt.LoadImaged(keys, ensure_channel_first=True),
        mt.Orientationd(keys, axcodes="RAS", labels=None),
        mt.Spacingd(keys, pixdim=plan["spacing_mm"], mode=modes),
        mt.NormalizeIntensityd("image", channel_wise=True),
    ]


def _loader(job: training.Job, plan: dict[str, Any]) -> Any:
    import monai.transforms as mt
    from monai.data import CacheDataset, DataLoader

    patch, files = plan["patch_size"], _files(job)
    crop = mt.RandCropByPosNegLabeld(BOTH, "label", patch, pos=1, neg=1, num_samples=CROPS)
    chance = [
        *(mt.RandFlipd(BOTH, prob=0.1, spatial_axis=axis) for axis in range(len(patch))),
        mt.RandShiftIntensityd("image", offsets=0.1, prob=0.5),
    ]
    steps = mt.Compose([*_read(plan, BOTH), mt.SpatialPadd(BOTH, patch), crop, *chance])
    cases = CacheDataset(
        [files[case] for case in job.train], steps, cache_rate=1.0, num_workers=None, progress=False
    )
    workers = len(os.sched_getaffinity(0)) // 2
    return DataLoader(
        cases, batch_size=CASES, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


if __name__ == "__main__":
    training.main(__doc__, prepare=prepare, train=train, predict=predict)
