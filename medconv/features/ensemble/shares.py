"""`--members auto`: how many members share `trainer.max_time`, by how often each would see every case."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import floor

import torch

from medconv import doors
from medconv.config import ConfigError, RunConfig
from medconv.config.values import duration_seconds, duration_text
from medconv.features.ensemble.members import Environment
from medconv.planning.limits import ENOUGH_STEPS, ENOUGH_VIEWS
from medconv.training.run import prepare
from medconv.training.run_dir import RunDir

_MOST = 10  # members: prediction takes as many times as long

log = logging.getLogger(__name__)


def rounds(config: RunConfig, folder: RunDir, devices: Sequence[Environment]) -> int:
    """How many members train one after another on each device in `trainer.max_time`; it is at least 1.

    A run that began keeps what was chosen for it: its own time says how many of it fit.

    Args:
        config: of the command, before its time is shared.
        folder: of the run.
        devices: as of `devices_of`.
    Raises:
        ConfigError: no time is set, or nothing measures what a step takes.
    """
    seconds = config.trainer.max_seconds
    if seconds is None:
        raise ConfigError("--members auto shares trainer.max_time among the members, but it is not set")
    if folder.resume == "auto" and folder.resume_from() is not None:
        own_time = folder.earlier_config()["trainer"]["max_time"]
        if own_time is None:
            raise ConfigError(f"{folder.path}: its run has no trainer.max_time; --members takes a number")
        return max(1, round(seconds / duration_seconds(own_time, "trainer.max_time")))
    steps_in_time = doors.named(doors.TUNERS, "steps")
    if steps_in_time is None:
        raise ConfigError(
            "--members auto needs medconv.features.autotune, which this installation lacks; "
            "--members takes a number"
        )
    # The smallest size makes the most steps, and ends as high as larger ones where cases are few
    small = replace(
        config,
        plan=replace(config.plan, size=config.plan.size or "small"),
        trainer=replace(config.trainer, devices=1),
    )
    small, prepared = prepare(small, RunDir(folder.path, "never"))
    steps: float
    with _threads_of_a_member(devices[0]):
        steps = steps_in_time(small, prepared.plan, prepared.derived)
    batch_size = small.data.global_batch_size or prepared.plan.batch_size
    seen = prepared.views(steps * batch_size * small.trainer.accumulate_grad_batches)
    count = max(1, min(_MOST // len(devices), floor(min(seen / ENOUGH_VIEWS, steps / ENOUGH_STEPS))))
    log.info(
        "--members auto: about %.0f steps fit into trainer.max_time and see each case %.0f times; %d steps "
        "and %d times are enough: %d member%s on each device",
        steps,
        seen,
        ENOUGH_STEPS,
        ENOUGH_VIEWS,
        count,
        "" if count == 1 else "s",
    )
    return count


@contextmanager
def _threads_of_a_member(environment: Environment) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", before)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share(config: RunConfig, count: int) -> str:
    """A member's share of `trainer.max_time`, as it is written there."""
    seconds = config.trainer.max_seconds
    assert seconds is not None
    return duration_text(seconds / count)
