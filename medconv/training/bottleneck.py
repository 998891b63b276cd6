"""One sentence at the end of a run: what limited its speed, and which setting would help."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medconv.config import PerfConfig, RunConfig, TrainerConfig
from medconv.utils.hardware import resolve_precision


@dataclass(frozen=True)
class _Limit:
    """From which share of the time a phase is a bottleneck, and what to say then.

    Args:
        share: of all time, from 0 to 1.
        verb: what the run does in that time, as the middle of a sentence.
        advice: as its end.
    """

    share: float
    verb: str
    advice: str


def verdict(shares: Mapping[str, float], config: RunConfig, cores: int) -> str | None:
    """The largest bottleneck and the setting against it; None if nothing was measured.

    Args:
        shares: from `StepProfiler.shares`.
        config: a resolved one.
        cores: available to this process.
    """
    if not shares:
        return None
    limits = _limits(config, cores)
    # of those over their limits the one with the largest share, not the one that is furthest over
    over = {phase: shares[phase] for phase, limit in limits.items() if shares[phase] > limit.share}
    if not over:
        network = shares["forward"] + shares["backward"] + shares["optimizer"]
        advice = _network_advice(config.perf, config.trainer)
        return f"{network:.0%} of the time is the network itself: {advice}"
    largest = max(over, key=lambda phase: over[phase])
    limit = limits[largest]
    return f"{over[largest]:.0%} of the time {limit.verb}: {limit.advice}"


def _limits(config: RunConfig, cores: int) -> dict[str, _Limit]:
    return {
        "data_wait": _Limit(
            share=0.1,
            verb="waits for data",
            advice=_loader_advice(config.data.num_workers, config.trainer.devices, cores),
        ),
        "copy_to_device": _Limit(
            share=0.1,
            verb="copies batches to the device",
            advice="try a smaller patch or batch; copies already use pinned memory",
        ),
        "augmentation": _Limit(
            share=0.15,
            verb="is augmentation on the device",
            advice="try augmentation=light or augmentation=none",
        ),
        "logging": _Limit(
            share=0.1,
            verb="is logging and callbacks",
            advice="try a larger trainer.log_every_n_steps, or callbacks=none",
        ),
        "validation": _Limit(
            share=0.3,
            verb="is validation",
            advice="try a larger trainer.check_val_every_n_epoch, or a smaller task.overlap",
        ),
    }


def _loader_advice(num_workers: int | None, devices: Any, cores: int) -> str:
    setting = "null (half of the cores)" if num_workers is None else str(num_workers)
    processes = devices if isinstance(devices, int) and devices > 0 else 1
    cores_per_process = max(1, cores // processes)
    advice = "augmentation=none, a larger data.prefetch_factor, or more cores"
    if num_workers is not None and num_workers < cores_per_process:
        advice = str(cores_per_process)
    return f"data.num_workers is {setting} with {cores} cores; try {advice}"


def _network_advice(perf: PerfConfig, trainer: TrainerConfig) -> str:
    if perf.activation_checkpointing != "none":
        return "perf.activation_checkpointing=none is faster, if the memory allows it"
    fastest = resolve_precision("auto", trainer.accelerator)
    if str(trainer.precision).startswith("32") and fastest != "32-true":
        return f"try trainer.precision={fastest}, or perf=autotune"
    if not perf.channels_last:
        return "try perf.channels_last=true"
    if not perf.compile:
        return "try perf.compile=true in long runs, a smaller network, or more devices"
    return "try a smaller network, or more devices"
