"""The processes of a run, and commands, forked from a server that has loaded the libraries: they begin at once.
They have the environment of the test that starts them; the server has that of the first one, with what it set.

Those in test_two_machines.py and a few others, of which most are slow, start processes as a user does.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import runpy
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import tiny
from helpers.waiting import PATIENCE_S

from medconv.cli import main
from medconv.cli.entrypoint import guard

SERVER = multiprocessing.get_context("forkserver")
# the server has no `tests/` on its path, so it loads what helpers and tests import, and what a run does
SERVER.set_forkserver_preload(
    [
        "medconv.cli.main",
        "medconv.cli.train",
        "medconv.data.augmentation.augment",
        "medconv.data.datasets.dataset_json",
        "medconv.training.losses.segmentation",
        "medconv.training.optim.muon",
        "medconv.training.run",
        "monai.losses",
        "nibabel",
        "pytest",
        "torch.utils.tensorboard",
        *(f"medconv.features.{path.name}" for path in (tiny.ROOT / "medconv/features").glob("[a-z]*/")),
    ]
)


# Linux gives those from 32768 to whoever asks for any; processes that run tests begin at different ones
_PORTS = itertools.count(10_000 + 100 * (os.getpid() % 200))


class Ended(NamedTuple):
    """What the processes of a run ended with, by rank."""

    codes: list[int | None]
    stdout: list[str]
    stderr: list[str]


def call(function: Callable[..., None], *arguments: Any) -> None:
    """Calls `function(rank, *arguments)` in two processes. Raises: what one of them raised."""
    torch.multiprocessing.start_processes(
        _call, (dict(os.environ), function, arguments), nprocs=2, start_method="forkserver"
    )


def _call(
    rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    set_environment(environment)
    function(rank, *arguments)


def set_environment(environment: dict[str, str]) -> None:
    """What a fork of the server does first. The garbage collector is not to look through what the server had: to
    touch all of it copies its memory, half of the time of a tiny run.
    """
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)


def start(*arguments: str, cwd: Path, number: int = 2, launcher: str = "torchrun") -> list[Any]:
    """The processes of `medconv train ARGUMENTS`.

    Args: launcher: several have the environment that this one gives them: torchrun, lightning, or a job that
        sets ranks alone.
    """
    shared: dict[str, Any] = {"OMP_NUM_THREADS": 1}
    if number > 1:
        shared |= _torchrun(number)
    own = {"torchrun": ("RANK", "LOCAL_RANK"), "lightning": ("LOCAL_RANK",), "job": ("RANK",)}[launcher]
    if launcher != "torchrun":
        others = ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK")
        shared = {name: value for name, value in shared.items() if name not in others}
    if launcher == "job":
        del shared["NODE_RANK"]
    processes = []
    for rank in range(number):
        variables = {key: str(value) for key, value in {**shared, **dict.fromkeys(own, rank)}.items()}
        environment = {**os.environ, **variables}
        processes.append(SERVER.Process(target=_train, args=(rank, arguments, cwd, environment)))
        processes[-1].start()
    return processes


def port() -> int:
    """A port that is free, and still is when processes meet there some seconds later."""
    while True:
        number = next(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", number))
            return number


def _torchrun(number: int) -> dict[str, Any]:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(), "TORCHELASTIC_RUN_ID": "test", "NODE_RANK": 0}
    sizes = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
    return {**group, **sizes, "GLOO_SOCKET_IFNAME": "lo"}


def run(*arguments: str, cwd: Path, number: int = 2, timeout: float = PATIENCE_S) -> Ended:
    """`start`, until all processes have ended."""
    return wait(start(*arguments, cwd=cwd, number=number), cwd, timeout)


def wait(processes: list[Any], cwd: Path, timeout: float = PATIENCE_S) -> Ended:
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [[(cwd / f"{kind}{rank}").read_text() for rank in range(len(codes))] for kind in ("out", "err")]
    return Ended(codes, *texts)


def _train(rank: int, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> None:
    set_environment(environment)
    _run(("train", *arguments), cwd, cwd / f"out{rank}", cwd / f"err{rank}")


def command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`medconv WORDS` in a process that has loaded the libraries and nothing of any test. It finds modules where a
    command does: not in folders that a test has put on the path.
    """
    return python("-m", "medconv.cli", *words, cwd=cwd, PYTHONPATH=str(tiny.ROOT))


def python(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ...` or `python FILE ...`, likewise. Its path is what PYTHONPATH names there."""
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name, "out"), Path(name, "err")
        arguments = (tuple(map(str, words)), cwd, {**os.environ, **environment}, out, err)
        process = SERVER.Process(target=_python, args=arguments)
        process.start()
        process.join(PATIENCE_S)
        process.kill()
        code: Any = process.exitcode
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _python(words: tuple[str, ...], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    set_environment(environment)
    _begin(cwd, out, err)
    is_module = words[0] == "-m"
    own = str(Path.cwd()) if is_module else str(Path(words[0]).resolve().parent)
    libraries = (sys.base_prefix, sys.prefix, *site.getsitepackages())
    named = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [own, *named, *(path for path in sys.path if path.startswith(libraries))]
    sys.argv = [*words[1:]] if is_module else [*words]
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _run(words: tuple[str, ...], cwd: Path, out: Path, err: Path) -> None:
    _begin(cwd, out, err)
    sys.argv = ["medconv", *words]
    sys.exit(guard(lambda: main.run([*words])))


def _begin(cwd: Path, out: Path, err: Path) -> None:
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, as in the command
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's server ignores it
