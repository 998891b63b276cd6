"""A tiny dataset and tiny runs on it: real files, real loaders, a real trainer, seconds instead of
minutes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.waiting import PATIENCE_S
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning import Callback
from omegaconf import DictConfig, OmegaConf

from medconv import config
from medconv.cli.main import main
from medconv.models.unet import UNet
from medconv.training import run
from medconv.training.run_dir import RunDir

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # of commands that import helpers and tests
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=4",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
    "callbacks=none",  # pictures take a quarter of such a run
    "data.batch_size=2",
    "data.samples_per_epoch=8",
    "data.num_workers=0",
    "data.num_folds=3",
    "model.channels=[4,8]",
    "model.strides=[2]",
    "model.kernel_size=3",
]


def write_dataset(root: Path, cases: int = 7, shape: tuple[int, ...] = (16, 18, 12)) -> Path:
    """Decathlon layout; in each case a bright box (`box`) and, but for the last, a dark one (`hole`) on
    noise.
    """
    (root / "imagesTr").mkdir(parents=True)
    (root / "labelsTr").mkdir()
    entries = []
    for i in range(cases):
        rng = np.random.default_rng(i)
        label = np.zeros(shape, np.uint8)
        label[(slice(2, 8), slice(3 + i % 3, 9 + i % 3), slice(1, 7))[: len(shape)]] = 1
        if i < cases - 1:
            label[(slice(10, 14), slice(10, 15), slice(2, 9))[: len(shape)]] = 2
        image = rng.normal(0, 0.1, shape) + np.array([1.0, 3.0, 0.2])[label]
        affine = np.diag([1.0, 1.5, 2.0, 1.0]) if i % 2 else np.diag([-1.0, 1.5, 2.0, 1.0])
        entry = {"image": f"./imagesTr/case_{i}.nii.gz", "label": f"./labelsTr/case_{i}.nii.gz"}
        nib.save(nib.Nifti1Image(image.astype(np.float32), affine), root / entry["image"])
        nib.save(nib.Nifti1Image(label, affine), root / entry["label"])
        entries.append(entry)
    labels = {"0": "background", "1": "box", "2": "hole"}
    meta = {
        "name": "Tiny",
        "modality": {"0": "MRI"},
        "labels": labels,
        "numTraining": cases,
        "training": entries,
    }
    (root / "dataset.json").write_text(json.dumps(meta))
    return root


def overrides(dataset: Path, *more: str) -> list[str]:
    return [
        "data=msd",
        f"data.root={dataset}",
        f"data.cache_dir={dataset.parent / 'prepared'}",
        *SMALL,
        *more,
    ]


def train(dataset: Path, folder: Path, *more: str) -> dict[str, Any]:
    """One run in this process; returns its summary."""
    return trained(*overrides(dataset, *more), f"run.dir={folder}")


def trained(*arguments: str) -> dict[str, Any]:
    """The run of these overrides, in this process; returns its summary."""
    settings = config.validate(composed(*arguments))
    return run.train(settings, RunDir.of(settings, {}))


def checked(dataset: Path, *more: str) -> config.RunConfig:
    """The config of a run, not yet resolved."""
    return config.validate(composed(*overrides(dataset, *more)))


def composed(*arguments: str) -> DictConfig:
    """The config that Hydra composes of overrides. That takes most of the time of a run that fails early, so it is
    done once for each choice of options (`conv=mirror`); plain values (`data.fold=7`) are set afterwards, as
    Hydra sets them; but where a key is removed (`~model.strides`), whose place among them counts.
    """
    is_value = re.compile(r"\+?((?!hydra\.)\w+(\.\w+)+|seed)=").match
    removes = any(argument.startswith("~") for argument in arguments)
    values = [argument for argument in arguments if is_value(argument) and not removes]
    chosen = _composed(tuple(argument for argument in arguments if argument not in values)).copy()
    for override in OverridesParser.create().parse_overrides(values):
        key, value = override.key_or_group, override.value()
        OmegaConf.update(chosen, key, value, merge=True, force_add=override.is_add())
    return chosen


@cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return compose("train", list(choices))


def command(
    name: str, *arguments: str, cwd: Path, timeout: float = PATIENCE_S, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """`train.py`, or a command of `medconv`, in a process of its own, as a user starts it."""
    return subprocess.run(
        [sys.executable, *words(name), *arguments],
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        check=False,
        **settings,
    )


def words(name: str) -> list[str]:
    """What an interpreter is given to run `train.py`, or a command of `medconv`."""
    return [str(ROOT / name)] if name.endswith(".py") else ["-m", "medconv.cli", name]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `medconv` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["medconv", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0)


def losses(folder: Path) -> list[float]:
    return logged(folder, "train/loss")


def logged(folder: Path, name: str) -> list[float]:
    """A value at every step that has one, from `metrics.csv`."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


class Net(UNet):
    """A network of the user's own."""


class Spy(Callback):
    """Writes the numbers of all training samples into a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{n}\n" for n in batch["sample"].tolist())


class Sizes(Callback):
    """Writes the spatial size of each training step's input into a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network.register_forward_pre_hook(self._write)

    def _write(self, network: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if network.training:
            with self.path.open("a") as file:
                file.write(json.dumps(inputs[0].shape[2:]) + "\n")


class OutOfMemory(Callback):
    """What a GPU does when a step is too large."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


class Buffers(Callback):
    """Writes each rank's buffers as they are in the first validation of trained weights."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            torch.save(
                [buffer.clone() for buffer in pl_module.buffers()],
                self.path / f"rank{trainer.global_rank}.pt",
            )


class Pids(Callback):
    """Writes each rank's process id after the fifth step. Args: lingers: seconds that the first takes to
    end.
    """

    def __init__(self, path: str, lingers: float = 0.0) -> None:
        self.path, self.lingers = Path(path), lingers

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        time.sleep(self.lingers if trainer.is_global_zero else 0)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 5:
            (self.path / f"pid{trainer.global_rank}").write_text(str(os.getpid()))


class FullLoss(torch.nn.Module):
    """As if no step fitted into memory."""

    def __init__(self, **ignored: float) -> None:
        super().__init__()

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
