"""The members of an ensemble: each is a process of `medconv train` with its own seed and folder, and maybe
another fold or other settings.
"""

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from medconv.config import RunConfig, compose
from medconv.data import splits
from medconv.inference.load import MOVED_ASIDE
from medconv.training.distributed import processes
from medconv.training.run import with_devices
from medconv.training.run_dir import RunDir
from medconv.utils import child_processes, signals
from medconv.utils.exit_codes import DONE, USER
from medconv.utils.hardware import num_cores, uses_gpu

_POLL_SECONDS = 0.2
_VISIBLE = "CUDA_VISIBLE_DEVICES"
Environment = Mapping[str, str]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """One network.

    Args:
        number: from 1.
        folder: of its run.
        arguments: of `medconv train`.
        settings: those of the arguments that other members have with other values.
    """

    number: int
    folder: RunDir
    arguments: tuple[str, ...]
    settings: tuple[str, ...] = ()


def members_of(
    config: RunConfig,
    folder: RunDir,
    arguments: Sequence[str],
    count: int,
    folds: bool,
    variants: Sequence[Sequence[str]] = ((),),
) -> list[Member]:
    """The members, the first of which is the run itself.

    Args:
        folder: of the run.
        arguments: of the command, without its own options.
        folds: whether each validates another fold.
        variants: settings that members have in turn.
    """
    fold_count = num_folds(config) if folds else 0
    one_device = ["trainer.devices=1"] if len(devices_of(config)) > 1 else []
    members = []
    for index in range(count):
        path = folder.path / "members" / str(index + 1) if index else folder.path
        own = [compose.as_override("run.dir", path), f"seed={config.seed + index}", *one_device]
        if folds:
            own.append(f"data.fold={(int(config.data.fold) + index) % fold_count}")
        settings = tuple(variants[index % len(variants)])
        member_arguments = with_keys(arguments, [*settings, *own])
        members.append(Member(index + 1, RunDir(path, folder.resume), member_arguments, settings))
    return members


def num_folds(config: RunConfig) -> int:
    """How many folds there are. Raises: ValueError: as `splits.folds_of_file`."""
    splits_file = config.data.splits_file
    return len(splits.folds_of_file(Path(splits_file))) if splits_file else config.data.num_folds


def with_keys(arguments: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """The arguments with further keys after the last one."""
    after = compose.place_of_keys(arguments).stop
    return (*arguments[:after], *keys, *arguments[after:])


def devices_of(config: RunConfig) -> list[Environment]:
    """What the environment of a member says of its device, for each of `trainer.devices`; one trains on each.

    Raises: ValueError: this machine lacks the devices.
    """
    trainer = with_devices(config).trainer
    devices = trainer.devices
    count = processes(trainer)
    if count == 1:
        return [{}]
    if not uses_gpu(config.trainer.accelerator):
        return [{"OMP_NUM_THREADS": str(max(1, num_cores() // count))}] * count
    numbers = devices if isinstance(devices, list) else range(count)
    visible = os.environ.get(_VISIBLE)
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return [{_VISIBLE: names[number]} for number in numbers]


def plan(members: Sequence[Member]) -> str:
    """The commands that `train` would start, to be copied: without `run.dry_run`, which asked for them."""
    commands = []
    for member in members:
        arguments = [word for word in member.arguments if not word.startswith("run.dry_run=")]
        commands.append(shlex.join(["medconv", "train", *arguments]))
    return "\n".join(commands)


def train(members: Sequence[Member], devices: Sequence[Environment]) -> int:
    """Train all members, one at a time on each device; one that fails does not stop the others, unless the
    input of the first was refused.

    Returns:
        The exit code, of the first that failed.
    Raises:
        KeyboardInterrupt, signals.RunInterrupted: it was stopped; no member runs any more.
    """
    home = members[0].folder
    if home.resume == "never":  # once, before any member has its folder in there
        home.move_aside()
    _leave_out_others(members)
    for member in members:  # a folder without a checkpoint is an error of prediction
        member.folder.checkpoints.mkdir(parents=True, exist_ok=True)
    before_it = _summary_time(home)
    waiting = deque(members)
    running: dict[int, tuple[Member, subprocess.Popen[bytes]]] = {}  # by device
    codes: dict[int, int] = {}
    stopped_by = 0

    def stop(number: int, frame: object = None) -> None:
        nonlocal stopped_by
        stopped_by = number
        for _, process in running.values():
            process.send_signal(number)

    with signals.handled(stop, *signals.PREEMPTING):
        try:
            while running or (waiting and not stopped_by):
                for device, environment in enumerate(devices):
                    if device not in running and waiting and not stopped_by:
                        member = waiting.popleft()
                        print(
                            f"\n[member {member.number} of {len(members)}] {member.folder.path}", flush=True
                        )
                        running[device] = (member, _started(member, environment))
                        if stopped_by:  # the signal came before it was listed
                            running[device][1].send_signal(stopped_by)
                time.sleep(_POLL_SECONDS)
                for device, (member, process) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[device]
                    codes[member.number] = code
                    is_first = member is members[0]
                    if is_first and code == USER and _summary_time(home) == before_it:
                        _leave_out(waiting)
                    if child_processes.was_interrupted(code):
                        raise KeyboardInterrupt
                    if child_processes.was_preempted(code) and not stopped_by:
                        stop(signal.SIGTERM)
        except KeyboardInterrupt:
            child_processes.end([process for _, process in running.values()])
            raise
    if stopped_by:
        raise signals.RunInterrupted(stopped_by)
    failed = [member for member in members if codes.get(member.number, DONE) != DONE]
    for member in failed:
        log.error(
            "member %d failed, %s: %s",
            member.number,
            child_processes.end_of(codes[member.number]),
            member.folder.path,
        )
    return child_processes.exit_code(codes[failed[0].number]) if failed else DONE


def _summary_time(folder: RunDir) -> int | None:
    """When a run has last written its summary, which it does as soon as it trains; None: never."""
    path = folder.path / "summary.json"
    return path.stat().st_mtime_ns if path.is_file() else None


def _leave_out(waiting: deque[Member]) -> None:
    """What is wrong with the config of the first member, these share, and its run predicts without them."""
    if waiting:
        log.error("member 1 was refused, so %d more are not started", len(waiting))
    while waiting:
        with suppress(OSError):  # it was trained by an earlier start
            waiting.popleft().folder.checkpoints.rmdir()


def _leave_out_others(members: Sequence[Member]) -> None:
    """Members of an earlier start with a larger number, which had not begun, are none any more.

    Raises: ValueError: one has been trained; prediction takes all that are there.
    """
    folders = {member.folder.path for member in members}
    others = [
        path.parent
        for path in members[0].folder.path.glob("members/*/checkpoints")
        if path.parent not in folders and not MOVED_ASIDE.search(path.parent.name)
    ]
    for path in others:
        if any(path.glob("checkpoints/*.ckpt")):
            raise ValueError(
                f"{path} is a member of an earlier start: --members {len(members)} leaves it out, but "
                f"prediction takes it: ask for {len(members) + len(others)} members, or remove it"
            )
    for path in others:
        with suppress(OSError):  # it holds something else
            (path / "checkpoints").rmdir()


def _started(member: Member, environment: Environment) -> subprocess.Popen[bytes]:
    arguments = member.arguments
    # Earlier ones were moved aside, for all members at once; or this is a restart of a job that did so
    if member.folder.resume == "never" or "run.resume=never" in arguments:
        arguments = with_keys(arguments, ["run.resume=auto"])
    command = [sys.executable, "-m", "medconv", "train", *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment})
