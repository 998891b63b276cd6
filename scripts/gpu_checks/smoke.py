"""Training, resuming, prediction and export run at all, and give what they should."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from lightning import Callback

from gpu_checks.claims import Expect, Figures, claim
from gpu_checks.setting import Setting

_KEYS = ("data_wait_share", "samples_per_second", "peak_memory_bytes", "steps", "wall_seconds")


def trained(setting: Setting, precision: str, *more: str) -> dict[str, Any]:
    summary = setting.train("run", f"trainer.precision={precision}", *more)
    known = setting.kind == "cpu" or summary["hardware"]["device"] == "cuda"
    figures = {"val/dice": summary["val/dice"], "done, on the device": known and summary["status"] == "done"}
    return figures | {key: summary[key] for key in _KEYS}


@claim(
    "train-bf16",
    "Training runs in bf16 with pinned memory and augmentation on the device, for a minute",
    Expect("val/dice", least=0.9),
    Expect("data_wait_share", most=0.05),
    Expect("done, on the device", least=1, tiny=True),
    limit_s=150,
)
def train_bf16(setting: Setting) -> Figures:
    return trained(setting, "bf16-mixed", "trainer.max_time=00:00:01:00", "data.samples_per_epoch=800")


@claim(
    "train-fp16",
    "The same in fp16 with loss scaling, for 40 seconds",
    Expect("val/dice", least=0.88),
    Expect("done, on the device", least=1, tiny=True),
    limit_s=110,
)
def train_fp16(setting: Setting) -> Figures:
    half = "16-mixed" if setting.kind == "cuda" else "bf16-mixed"
    return trained(setting, half, "trainer.max_time=00:00:00:40", "data.samples_per_epoch=800")


@claim(
    "train-compiled", "Training runs compiled", Expect("done, on the device", least=1, tiny=True), limit_s=140
)
def train_compiled(setting: Setting) -> Figures:
    compiled = (
        f"perf.compile={setting.pick('true', 'false')}"  # the compiler would take half of the tiny form
    )
    return trained(setting, "bf16-mixed", "trainer.max_steps=100", compiled)


@claim(
    "resume",
    "A run that was stopped after half of its steps ends with the losses of one that was not, bit for bit",
    Expect("largest difference of a loss", most=0, tiny=True),
    Expect("steps after resuming", least=2, most=10, tiny=True),
    limit_s=90,
)
def resume(setting: Setting) -> Figures:
    steps = setting.pick(20, 10)
    same = ["trainer.deterministic=true", "trainer.precision=32-true", "schedule.patch=whole"]
    # The half is stopped as a user's run is: with fewer max_steps its learning rate would warm up faster.
    stop = f"+callbacks.stop={{_target_:{__name__}.StopAfter,steps:{steps // 2}}}"
    last = setting.folder / "half/checkpoints/last.ckpt"
    lengths = [f"trainer.max_steps={steps}"]
    setting.train("whole", *same, *lengths, tiny=lengths)
    setting.train("half", *same, *lengths, stop, tiny=lengths)
    summary = setting.train("resumed", *same, *lengths, f"run.resume={last}", tiny=lengths)
    expected, resumed = losses(setting, "whole"), losses(setting, "resumed")
    shared = [abs(resumed[step] / expected[step] - 1) for step in resumed]
    return {
        "largest difference of a loss": max(shared),
        "steps": summary["steps"],
        "steps after resuming": len(resumed),
    }


class StopAfter(Callback):
    """Stops its run by a signal, as a scheduler does. Args: steps: after which."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:
            os.kill(os.getpid(), signal.SIGTERM)


def losses(setting: Setting, name: str) -> dict[int, float]:
    """The logged losses of a run, by step."""
    with (setting.folder / name / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row["train/loss"]) for row in rows if row.get("train/loss")}


@claim(
    "predict",
    "Prediction on the device gives the label maps of the CPU",
    Expect("voxels that differ", most=1e-2, tiny=True),
    Expect("cases", least=1, tiny=True),
    limit_s=70,
)
def predict(setting: Setting) -> Figures:
    return _compared(setting, [["--device", setting.kind], ["--device", "cpu"]], setting.checkpoint())


@claim(
    "export",
    "A network that was trained on the device can be exported, as ONNX too where that is installed",
    Expect("formats", least=1, tiny=True),
    limit_s=80,
)
def export(setting: Setting) -> Figures:
    formats = ["pt2", *(["onnx"] if find_spec("onnx") and find_spec("onnxscript") else [])]
    formats = setting.pick(formats, formats[:1])
    checkpoint = str(setting.checkpoint())
    for name in formats:
        output = str(setting.folder / f"model.{name}")
        setting.medconv("export", "--checkpoint", checkpoint, "--format", name, "--output", output)
    return {"formats": len(formats)}


def _compared(setting: Setting, variants: Sequence[Sequence[str]], checkpoint: Path) -> dict[str, Any]:
    """Share of the foreground's voxels that differ between two predictions."""
    images = sorted(setting.images().glob("*.nii.gz"))[: setting.pick(6, 1)]
    cases = setting.folder / "cases.txt"
    cases.write_text("\n".join(map(str, images)) + "\n")
    folders: list[Path] = []
    for number, words in enumerate(variants):
        folders.append(setting.folder / f"predicted{number}")
        source = ["--checkpoint", str(checkpoint), "--input", str(cases)]
        setting.medconv("predict", *source, "--output", str(folders[-1]), *words)
    files = [sorted(folder.glob("*.nii.gz")) for folder in folders]
    different = foreground = 0
    for one, other in zip(*files, strict=True):
        a, b = (np.asarray(nib.Nifti1Image.from_filename(file).dataobj) for file in (one, other))
        different, foreground = different + int((a != b).sum()), foreground + int(((a > 0) | (b > 0)).sum())
    return {"voxels that differ": different / max(1, foreground), "cases": len(files[0])}
