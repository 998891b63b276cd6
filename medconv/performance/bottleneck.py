"""One sentence at the end of a run: what limited its speed, and which setting would help."""

from collections.abc import Mapping
from typing import Any

from medconv.config import PerfConfig, RunConfig, TrainerConfig
from medconv.utils.hardware import resolve_precision

_COPY = "try a smaller patch or batch; copies already use pinned memory"
_AUGMENTATION = "try augmentation=light or augmentation=none"
_LOGGING = "try a larger trainer.log_every_n_steps, or callbacks=none"
_VALIDATION = "try a larger trainer.check_val_every_n_epoch, or a smaller task.overlap"


def verdict(shares: Mapping[str, float], config: RunConfig, cores: int) -> str | None:
    """The largest bottleneck and the setting against it; None if nothing was measured.

    Args: shares: from `StepProfiler.shares`. config: a resolved one. cores: available to this process.
    """
    if not shares:
        return None
    compute = shares["forward"] + shares["backward"] + shares["optimizer"]
    limits = {
        "data_wait": (0.1, "waits for data", _feed(config.data.num_workers, config.trainer.devices, cores)),
        "copy_to_device": (0.1, "copies batches to the device", _COPY),
        "augmentation": (0.15, "is augmentation on the device", _AUGMENTATION),
        "logging": (0.1, "is logging and callbacks", _LOGGING),
        "validation": (0.3, "is validation", _VALIDATION),
    }
    over = {name: shares[name] for name, (limit, _, _) in limits.items() if shares[name] > limit}
    if not over:
        return f"{compute:.0%} of the time is the network itself: {_compute(config.perf, config.trainer)}"
    worst = max(over, key=lambda name: over[name])
    _, what, advice = limits[worst]
    return f"{over[worst]:.0%} of the time {what}: {advice}"


def _feed(workers: int | None, devices: Any, cores: int) -> str:
    shown = "null (half of the cores)" if workers is None else str(workers)
    more = max(1, cores // (devices if isinstance(devices, int) and devices > 0 else 1))
    advice = "augmentation=none, a larger data.prefetch_factor, or more cores"
    if workers is not None and workers < more:
        advice = str(more)
    return f"data.num_workers is {shown} with {cores} cores; try {advice}"


def _compute(perf: PerfConfig, trainer: TrainerConfig) -> str:
    if perf.activation_checkpointing != "none":
        return "perf.activation_checkpointing=none is faster, if the memory allows it"
    half = resolve_precision("auto", trainer.accelerator)
    if str(trainer.precision).startswith("32") and half != "32-true":
        return f"try trainer.precision={half}, or perf=autotune"
    if not perf.channels_last:
        return "try perf.channels_last=true"
    if not perf.compile:
        return "try perf.compile=true in long runs, a smaller network, or more devices"
    return "try a smaller network, or more devices"
