"""What a part works with: the device, sizes, folders, and commands of medconv in processes of their own."""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.peers import process
from benchmarks.peers.forked import ForkedPeer
from gpu_checks.failures import failure, sizes

FORK = multiprocessing.get_context("fork")  # libraries are imported once, before any part
T = TypeVar("T")
_DUMP_S = 4.0  # before the limit, every process writes where it is
# Of every training: short, and on the phantoms, which need no download.
_TRAINING = (
    *("logger=none", "callbacks=none", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1"),
    *("trainer.max_time=null", "trainer.num_sanity_val_steps=0", "trainer.devices=1"),
)
_TINY = ("data.batch_size=2", "data.num_workers=0", "data.samples_per_epoch=4", "trainer.max_steps=2")
_TINY_PHANTOMS = (
    *("data.layout.num_cases=5", "data.patch_size=[16,16,16]", "data.spacing_mm=[4,4,4]"),
    *("plan.channels=[4,8]", "plan.strides=[[2,2,2]]"),
)


class CommandError(RuntimeError):
    """A command failed; what it printed is in the part's log."""


def in_own_process(what: str, function: Callable[[], Any]) -> Any:
    """What a function returns that begins CUDA, or fills its caches, in a process of its own.

    Before this one begins CUDA. Raises: RuntimeError: it failed. Args: what: for the message.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{what} ended with {process.exitcode}, see above") from None
    process.join()
    return answer


class Setting:
    """Args: folder: of this part alone. shared: of all parts, for what is made once. limit_s: from now on."""

    def __init__(self, device: str, tiny: bool, folder: Path, shared: Path, limit_s: float) -> None:
        self.kind, self.tiny, self.folder, self.shared = device, tiny, folder, shared
        self.limit_s, self._begun = limit_s, time.monotonic()
        self._touched = False

    def watch(self) -> None:
        """If this process is still at work when the limit comes, it writes where it is."""
        left = self.limit_s - (time.monotonic() - self._begun) - _DUMP_S
        faulthandler.dump_traceback_later(max(1.0, left))

    @property
    def device(self) -> torch.device:
        """For parts that compute in their own process. They can start no command: CUDA does not survive a
        fork.
        """
        self._touched = True
        return torch.device(self.kind)

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def train(self, name: str, *overrides: str, tiny: Sequence[str] = ()) -> dict[str, Any]:
        """Train on the phantoms, by the command. Returns: the content of `summary.json`.

        Args: tiny: sizes in the tiny form, which has its own, and its number of steps.
        Raises: CommandError: it failed.
        """
        try:
            self.medconv("train", *self.overrides(name, *overrides, tiny=tiny))
        except CommandError as error:
            raise CommandError(f"{error}\n{sizes(self.folder / name)}") from None
        summary: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_text())
        return summary

    def overrides(self, name: str, *more: str, tiny: Sequence[str] = ()) -> list[str]:
        """The command line of `train`. Args: more: `--KEY=VALUE` may stand among them."""
        flags = [word for word in more if word.startswith("--")]
        rest = [word for word in more if word not in flags]
        phantoms = not any(word.startswith("data=") for word in rest)
        root = [f"data.root={self.shared / 'phantom'}"] if phantoms else []
        sizes = [*_TINY, *(_TINY_PHANTOMS if phantoms else ())] if self.tiny else []
        accelerator = f"trainer.accelerator={'gpu' if self.kind == 'cuda' else 'cpu'}"
        return [
            *(*flags, accelerator, f"run.dir={self.folder / name}", *root),
            *(f"data.cache_dir={self.shared / 'prepared'}", *_TRAINING, *sizes),
            *([*_kept(rest), *tiny] if self.tiny else rest),
        ]

    def medconv(self, *words: str) -> None:
        """`medconv` with these arguments. Raises: CommandError: it ended with another code than 0."""
        self._command(f"python -m medconv.cli {shlex.join(words)}", _medconv, (words,))

    def benchmark(self, name: str, *words: str, tiny: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The rows of `scripts/benchmark.py NAME`.

        Args: tiny: in the tiny form, values of the benchmark's constants for which it has no option.
        Raises: CommandError: it failed.
        """
        file = self.folder / f"{name}-{len(list(self.folder.glob('*.json')))}.json"
        words = (name, *words, "--json", str(file))
        run = partial(_tiny_benchmark, tiny or {}) if self.tiny else _benchmark
        self._command(f"python scripts/benchmark.py {shlex.join(words)}", run, (words,))
        rows: list[dict[str, Any]] = json.loads(file.read_text())
        return rows

    def checkpoint(self) -> Path:
        """Of a network that all parts share, trained on the phantoms by the first that asks for it."""
        found = self.shared / "trained/checkpoints/best.ckpt"
        if not found.is_file():
            words = ["trainer.max_steps=150", f"run.dir={found.parents[1]}", "run.resume=never"]
            self.medconv("train", *self.overrides("trained", *words))
        return found

    def images(self) -> Path:
        """A folder of images that the shared network takes."""
        return self.shared / "phantom/imagesTr"

    def _command(self, line: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._touched:
            raise RuntimeError("a part that computes on the device itself can start no command")
        print(f"\n$ {line}", flush=True)
        process = FORK.Process(target=self._watched, args=(function, arguments))
        faulthandler.cancel_dump_traceback_later()  # the fork would wait for its thread, which it has not
        process.start()
        self.watch()
        process.join()
        if process.exitcode:
            raise CommandError(f"`{line}` ended with code {process.exitcode}; its output is in the log")

    def _watched(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.watch()
        try:
            function(*arguments)
        except Exception as error:
            print(failure(error), flush=True)
            sys.exit(1)


def _kept(overrides: Sequence[str]) -> list[str]:
    """Of a full-size training, what also holds for a tiny one: no sizes and no numbers of steps."""
    sized = (
        *("trainer.max_steps=", "trainer.max_time=", "plan.", "data.patch_size=", "data.spacing_mm="),
        *("data.batch_size=", "data.samples_per_epoch=", "data.num_workers="),
    )
    return [each for each in overrides if not each.startswith(sized)]


def _medconv(words: Sequence[str]) -> None:
    from medconv.cli.main import run  # not `main`, which makes one line of an error and forgets its frames

    # from it Lightning makes the commands of further processes
    train = Path(__file__).parents[2] / "train.py"
    sys.argv = [str(train), *words[1:]] if words[0] == "train" else ["medconv", *words]
    sys.exit(run(words))


def _tiny_benchmark(constants: dict[str, Any], words: Sequence[str]) -> None:
    module = importlib.import_module(f"benchmarks.{words[0]}")
    for name, value in constants.items():
        setattr(module, name, value)
    process.Popen = ForkedPeer  # type: ignore[attr-defined, assignment]
    _benchmark(words)


def _benchmark(words: Sequence[str]) -> None:
    sys.argv = ["benchmark.py", *words]
    importlib.import_module("benchmark").main()
