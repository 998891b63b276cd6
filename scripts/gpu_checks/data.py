"""Loading and augmentation keep up with the device; whole images; prediction of many cases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from gpu_checks.claims import Expect, Figures, claim
from gpu_checks.limits import Peaks, step_seconds, step_work
from gpu_checks.networks import LARGE_PATCHES, LARGE_PHANTOM, PHANTOM, seconds, wait
from gpu_checks.setting import Setting
from medconv import config
from medconv.data.augmentation import intensity
from medconv.data.loading import patch
from medconv.planning.topology import stem_for

_PATCH = 128**3
_PICTURES = (60, 1, 28, 28)  # a batch of `whole-images`
PLANNED: dict[str, Any] = {
    "spatial_dims": 2,
    "channels": (32, 64, 128),
    "strides": ((2, 2), (2, 2)),
}  # for them


def _carried(peaks: Peaks, voxels: int) -> float:
    """Samples a second that the link to the device carries: an fp16 channel and a label of one byte."""
    return peaks.host / (3 * voxels)


@claim(
    "loader",
    "Training samples a second of one worker's core, at the size that a GPU's augmentation needs",
    Expect("ours, times the best peer", least=1),
    Expect("ours", limit=lambda peaks: _carried(peaks, 96**3)),
    limit_s=150,
)
def loader(setting: Setting) -> Figures:
    """The distance to the limit is how many such cores would fill the link to the device."""
    rows = _data(setting, "loader", 96)
    speed = {row["variant"]: row["samples_per_second"] for row in rows}
    best = max((value for name, value in speed.items() if name != "ours"), default=float("nan"))
    return {"ours, times the best peer": speed["ours"] / best, **speed}


def _copied_limit(peaks: Peaks) -> float:
    """What the network takes or the link carries."""
    return min(LARGE_PHANTOM.batch / LARGE_PHANTOM.limit_seconds(peaks), _carried(peaks, _PATCH))


@claim(
    "copy",
    "Batches reach the device while it computes: shares of a training's steps at 128x128x128, batch 2",
    Expect("copy_to_device", most=0.02),
    Expect("data_wait", most=0.05),
    Expect("augmentation", most=0.1),
    Expect("samples/s", limit=_copied_limit),
    limit_s=120,
)
def copy(setting: Setting) -> Figures:
    steps = [
        "schedule.patch=whole",
        "trainer.max_steps=80",
        "trainer.limit_val_batches=0",
        "data.samples_per_epoch=400",
    ]
    summary = setting.train(
        "run", *LARGE_PATCHES, *steps, "augmentation=strong", "trainer.log_every_n_steps=50"
    )
    return {**summary["step_shares"], "samples/s": summary["samples_per_second"]}


def _augmentation_limit(peaks: Peaks) -> float:
    """Reads the voxels that a patch shows once, about 1.3 times as many, and writes it once, fp32."""
    return peaks.seconds(4 * 2.3 * _PATCH)


@claim(
    "augmentation-speed",
    "Augmentation of a batch on the device at 128x128x128, beside MONAI's on a core; the goal of 100 times "
    "nnU-Net's is 25 times MONAI's, which took a quarter of nnU-Net's time",
    Expect("times MONAI", least=25),
    Expect("seconds a sample", limit=_augmentation_limit),
    limit_s=200,
)
def augmentation_speed(setting: Setting) -> Figures:
    rows = _data(setting, "transforms", 128, "--batches", *setting.pick(["2", "8", "32"], ["2"]))
    there = [row for row in rows if "on the GPU" in row["variant"]] or [
        r for r in rows if "ours" in r["variant"]
    ]
    best = min(there, key=lambda row: float(row["seconds"]))
    return {
        "times MONAI": best["times_as_fast"],
        "seconds a sample": best["seconds"],
        **{f"{row['variant']}, seconds a sample": row["seconds"] for row in rows},
    }


_ROWS = 4  # of the part below: batch 2 of two channels, or half of batch 8
_CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "brightness": lambda rows, factors: intensity.scale_(rows, factors, factors - 1),
    "contrast": intensity.stretch_,
    "gamma": lambda rows, factors: intensity.bend_(rows, factors, False),
}


def _change_limit(peaks: Peaks) -> float:
    """Reads and writes each fp32 number once."""
    return peaks.seconds(2 * 4 * _ROWS * _PATCH)


@claim(
    "augmentation-compiled",
    "Changes of values in augmentation, each compiled as one graph, beside eager, 4 rows of 128x128x128; "
    "where they gain more than compiling takes, `perf.compile` should compile them",
    Expect("largest difference", most=1e-3, tiny=True),
    *(Expect(f"{name}, compiled, seconds", limit=_change_limit) for name in _CHANGES),
    limit_s=150,
)
def augmentation_compiled(setting: Setting) -> Figures:
    device, shape = setting.device, (_ROWS, *[setting.pick(128, 8)] * 3)
    backend, rounds = setting.pick("inductor", "aot_eager"), setting.pick(5, 1)
    figures: dict[str, float] = {"largest difference": 0.0}
    for name, change in _CHANGES.items():
        compiled: Any = torch.compile(change, backend=backend, fullgraph=True, dynamic=True)
        rows = torch.rand(shape, device=device)
        found, expected = rows.clone(), rows.clone()
        factors = torch.linspace(0.8, 1.3, _ROWS, device=device)
        begun = time.perf_counter()
        compiled(found, factors)
        wait(device)
        figures[f"{name}, seconds to compile"] = time.perf_counter() - begun
        change(expected, factors)
        difference = float((found - expected).abs().max())
        figures["largest difference"] = max(figures["largest difference"], difference)
        neutral = torch.ones_like(factors)  # so that the values stay what they are, call after call
        for kind, function in {"eager": change, "compiled": compiled}.items():
            figures[f"{name}, {kind}, seconds"] = seconds(partial(function, rows, neutral), device, rounds)
    return figures


@claim(
    "packed-boxes",
    "Where packed voxels stand in 4 boxes of 128x128x128, half filled: computed in 64 bits, times 32",
    Expect("64 bits, times 32", least=1),
    Expect("differing places", most=0, tiny=True),
    limit_s=20,
    no_limit="none: a few passes over indices, beside a step",
)
def packed_boxes(setting: Setting) -> Figures:
    edge, slabs = setting.pick(128, 8), setting.pick(16, 2)
    begin = torch.tensor([[b, edge // slabs * s, 0, edge // 4] for b in range(4) for s in range(slabs)])
    end = begin + torch.tensor([1, edge // slabs, edge, edge // 2])
    blocks = torch.stack([begin, end], 1).to(setting.device)
    box = (edge, edge, edge)

    def places() -> Tensor:
        return patch.voxels_of(blocks, box, 4, 4 * edge**3 // 2)

    def timed() -> float:
        return seconds(places, setting.device, setting.pick(20, 1))

    narrow, narrow_seconds = places(), timed()
    with mock.patch.object(patch, "_INT32", 0):  # every index is too large for 32 bits
        wide, wide_seconds = places(), timed()
    return {
        "differing places": int((narrow != wide).sum()),
        "64 bits, times 32": wide_seconds / narrow_seconds,
        "32 bits, seconds": narrow_seconds,
    }


def _data(setting: Setting, part: str, patch: int, *words: str) -> list[dict[str, Any]]:
    edge = setting.pick(patch, 16)
    shape = setting.pick(["240", "240", "160"], ["20", "20", "20"])
    sizes = [
        "--large-shape",
        *shape,
        "--large-patch",
        *[str(edge)] * 3,
        "--large-cases",
        setting.pick("2", "1"),
    ]
    rounds = ["--rounds", setting.pick("4", "1"), "--seconds", setting.pick("2", "0.1")]
    scratch = ["--scratch", str(setting.shared / "data-benchmark")]
    return setting.benchmark("data", "--parts", part, "--sets", "large", *sizes, *rounds, *scratch, *words)


def _classifier(name: str) -> nn.Module:
    """As conf/model makes it."""
    derived = {
        **PLANNED,
        "kernel_sizes": 3,
        "num_channels": 1,
        "num_classes": 2,
        "stem": stem_for(_PICTURES[2:]),
    }
    option = OmegaConf.load(config.conf_dir() / f"model/{name}.yaml")
    content = OmegaConf.to_container(OmegaConf.create({"derived": derived, "model": option}), resolve=True)
    return config.build(content["model"], "model")  # type: ignore[arg-type, call-overload, index]


def _pictures_limit(name: str) -> Callable[[Peaks], float]:
    build = partial(_classifier, name)
    return lambda peaks: _PICTURES[0] / step_seconds(peaks, step_work(build, _PICTURES))


@claim(
    "whole-images",
    "Classifiers of whole images train: our `encoder`, MONAI's `resnet`, and compiled; Grad-CAM",
    Expect("done", least=1, tiny=True),
    Expect("encoder, samples/s", limit=_pictures_limit("encoder")),
    Expect("encoder, compiled, samples/s", limit=_pictures_limit("encoder")),
    Expect("resnet, samples/s", limit=_pictures_limit("resnet")),
    limit_s=150,
)
def whole_images(setting: Setting) -> Figures:
    file = _medmnist(setting.shared / "squares.npz", setting.pick(400, 12))
    data = ["data=medmnist", f"data.root={file}", "trainer.max_steps=300", "callbacks=default"]
    variants = {"encoder": ["model=encoder"], "resnet": ["model=resnet"]}
    variants["encoder, compiled"] = ["model=encoder", "perf.compile=true"]
    found: dict[str, Any] = {"done": True}
    for name, words in list(variants.items())[: setting.pick(3, 1)]:
        summary = setting.train(name.replace(", ", "-"), *data, *words, tiny=["data.batch_size=4"])
        found["done"] &= summary["status"] == "done"
        found[f"{name}, samples/s"] = summary["samples_per_second"]
    return found


def _medmnist(file: Path, number: int) -> Path:
    """Bright and dark squares on noise, in the file format of MedMNIST."""
    rng, arrays = np.random.default_rng(0), dict[str, Any]()
    for split in ("train", "val", "test"):
        labels = np.arange(number, dtype=np.uint8)[:, None] % 2
        images = rng.integers(60, 140, (number, 28, 28), dtype=np.uint8)
        images[:, 8:20, 8:20] += (100 * labels)[:, :, None].astype(np.uint8)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)
    return file


@claim(
    "prediction-stream",
    "Prediction with loading and writing beside the network, against one case after another",
    Expect("one after another, times streamed", least=1.2),
    Expect("streamed, 4 loading, seconds a case", limit=replace(PHANTOM, batch=1).predicting_seconds),
    limit_s=80,
)
def prediction_stream(setting: Setting) -> Figures:
    """The limit: the network on one window, while all else hides behind it."""
    checkpoint = ["--checkpoint", str(setting.checkpoint()), "--input", str(setting.images())]
    size = ["--cases", setting.pick("30", "1"), "--pairs", setting.pick("3", "1"), "--workers", "1", "4"]
    rows = setting.benchmark("prediction", *checkpoint, *size, "--device", setting.kind)
    per_case = {row["variant"]: row["seconds_per_case"] for row in rows}
    streamed = min(value for name, value in per_case.items() if name != "one after another")
    named = {f"{name}, seconds a case": value for name, value in per_case.items()}
    return {"one after another, times streamed": per_case["one after another"] / streamed, **named}


@claim(
    "export-speed",
    "The exported network beside the checkpoint's, seconds for a batch of windows (`benchmark.py export`)",
    Expect("formats", least=1, tiny=True),
    limit_s=80,
    no_limit="none: files are compared with the checkpoint",
)
def export_speed(setting: Setting) -> Figures:
    formats = ["--formats", *setting.pick(["pt2", "torchscript"], ["torchscript"])]
    words = ["--checkpoint", str(setting.checkpoint()), "--pairs", setting.pick("5", "1"), *formats]
    rows = setting.benchmark("export", *words, "--device", setting.kind)
    return {"formats": len(formats) - 1, **{f"{row['variant']}, seconds": row["seconds"] for row in rows}}
