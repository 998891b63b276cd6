"""Runs in processes that tests kill and start again, and what must be equal to a run that was never killed."""

from __future__ import annotations

import csv
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import tiny
from helpers.ranks import SERVER, set_environment
from lightning import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data._utils import worker

from medconv.cli.entrypoint import guard
from medconv.utils import checkpoint_io
from medconv.utils.exit_codes import DONE

STEPS = [
    "data.num_workers=2",
    # seven batches: an epoch's last step has fewer of them where gradients are accumulated
    "data.samples_per_epoch=14",
    "trainer.max_steps=17",
    "run.checkpoint_interval=00:00:00:00",
    "model._target_=helpers.resuming.Dropping",
    "weight_averaging.begin=4",
    "weight_averaging.every=3",
    "callbacks=default",
    "+callbacks.beat._target_=helpers.resuming.Beat",
]
KILLED = -signal.SIGKILL


class Beat(Callback):
    """Adds a byte to a file for each training batch, `t`, and for each case that is validated, `v`.

    The process can send itself a signal, which no other process sends so exactly.

    Args:
        at: after which beat: `t3` is the third training batch of this process, `tv3` the third of both.
        delay: seconds until then; SIGKILL comes before the next beat.
        pause: seconds for a case.
    """

    def __init__(
        self, path: str, at: str = "", signal: str = "SIGKILL", delay: float = 0.0, pause: float = 0.0
    ) -> None:
        self.path, self.signal, self.delay, self.pause = path, signal, delay, pause
        self.kinds, self.left = at.rstrip("0123456789"), int(at.lstrip("tv") or 0)
        self.killer: threading.Timer | None = None

    def on_train_batch_start(self, *args: Any) -> None:
        self._beat("t")

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._beat("v")
            time.sleep(self.pause)

    def on_fit_end(self, *args: Any) -> None:
        self._wait_for_the_end()

    def _beat(self, kind: str) -> None:
        self._wait_for_the_end()
        with Path(self.path).open("a") as file:
            file.write(kind)
        if kind not in self.kinds:
            return
        self.left -= 1
        if self.left == 0:
            self._send()

    def _send(self) -> None:
        number = signal.Signals[self.signal]
        if number != signal.SIGKILL:
            os.kill(os.getpid(), number)
            return
        self.killer = threading.Timer(self.delay, os.kill, (os.getpid(), number))
        self.killer.start()

    def _wait_for_the_end(self) -> None:
        if self.killer is not None:
            self.killer.join()


class Dropping(tiny.Net):
    """Draws random numbers in each forward pass of the training, as networks with dropout do."""

    def forward(self, image: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        return super().forward(torch.nn.functional.dropout(image, 0.3, self.training), *arguments, **settings)


def start(dataset: Path, folder: Path, settings: Sequence[str], **environment: str) -> Any:
    """A process that trains, from a server that has imported all: it begins at once."""
    process = SERVER.Process(target=_train, args=(dataset, folder, settings, {**os.environ, **environment}))
    process.start()
    return process


def _train(dataset: Path, folder: Path, settings: Sequence[str], environment: dict[str, str]) -> None:
    set_environment(environment)
    logging.basicConfig(filename=messages(folder), level=logging.INFO)
    torch.set_num_threads(1)
    worker.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds after which a loader's worker looks for its parent
    multiprocessing.set_start_method("fork", force=True)  # of the loaders' workers, as in the command
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's server ignores it
    beat = f"+callbacks.beat.path={beats(folder)}"
    sys.exit(guard(lambda: tiny.train(dataset, folder, *settings, beat) and DONE))


def beats(folder: Path) -> Path:
    return folder.with_suffix(".beats")


def messages(folder: Path) -> Path:
    """What the log of all processes of a run says."""
    return folder.with_suffix(".messages")


def wait_for(process: Any, folder: Path, number: int, kind: str = "tv") -> None:
    """Until so many batches of a kind were done in this folder, or the process has ended."""
    while process.is_alive() and _counted(folder, kind) < number:
        time.sleep(0.005)


def _counted(folder: Path, kind: str) -> int:
    text = beats(folder).read_text() if beats(folder).is_file() else ""
    return sum(text.count(letter) for letter in kind)


def train(dataset: Path, folder: Path, settings: Sequence[str], kills: int = 0, seed: int = 0) -> int:
    """One run to its end, killed up to so many times; returns how often it was."""
    rng, done = random.Random(seed), 0
    while True:
        killed = [f"+callbacks.beat.at=tv{rng.randint(1, 8)}", f"+callbacks.beat.delay={0.05 * rng.random()}"]
        process = start(dataset, folder, [*settings, *(killed if done < kills else ())])
        process.join()
        done += process.exitcode == KILLED
        if process.exitcode != KILLED:
            assert process.exitcode == DONE
            return done


def same(one: Any, other: Any, where: str = "") -> None:
    """Every tensor and value, to the last bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}.{index}")
    else:
        assert one == other, where


def rows(folder: Path) -> list[dict[str, str]]:
    """Of `metrics.csv`, without how long things took."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if v and not k.startswith("perf/")} for row in csv.DictReader(file)
        ]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    read.Reload()
    tags = [tag for tag in read.Tags()["scalars"] if not tag.startswith("perf/")]
    pictures = {tag: [(event.step, 0.0) for event in read.Images(tag)] for tag in read.Tags()["images"]}
    return {**pictures, **{tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}}


def assert_the_same_run(one: Path, other: Path) -> None:
    for name in ("last", "best"):
        a, b = (checkpoint_io.read(folder / f"checkpoints/{name}.ckpt") for folder in (one, other))
        for key in (
            "state_dict",
            "current_model_state",
            "averaging_state",
            "optimizer_states",
            "lr_schedulers",
            "global_step",
        ):
            same(a[key], b[key], f"{name} {key}")
        same(a["medconv"]["validation"], b["medconv"]["validation"], name)
        assert a["callbacks"].keys() == b["callbacks"].keys()
        for key in a["callbacks"].keys() - {"StepProfiler"}:  # how long things took
            same(a["callbacks"][key], b["callbacks"][key], f"{name} {key}")
    assert rows(one) == rows(other)
    assert events(one) == events(other)


def status(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["status"]


def last(folder: Path) -> dict[str, Any]:
    return checkpoint_io.read(folder / "checkpoints/last.ckpt")
