"""What a run tells of itself beside its scores, in its log and in keys of its `summary.json`.

At the start, what its convolution costs beside `nn.Conv`; at the end, what limited its speed, and which
setting would help; and where the first value of a step that is not finite came from.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import nn

from medconv import config as configs
from medconv.config import Node, PerfConfig, RunConfig, TrainerConfig
from medconv.convs.parametrization import CONVS, only_draws
from medconv.convs.swap import swap_convs
from medconv.features.diagnosis import conv_cost
from medconv.features.diagnosis.conv_cost import NetworkSizes, computing_in, replaced_layers, switches_of
from medconv.features.diagnosis.nonfinite import Diagnosis
from medconv.models.build import KEYS_OF_SWAP_CONVS
from medconv.performance.step_profiler import StepProfiler
from medconv.training.callbacks.nonfinite_guard import RunningStatistics, StepRecord
from medconv.utils.errors import first_line
from medconv.utils.hardware import autocast_dtype, num_cores, resolve_precision, uses_gpu

_SECONDS = 1.0  # for all layers; at least one step of each is timed
_LONG_ENOUGH = 10.0  # seconds of training; what limited a shorter run means little

log = logging.getLogger(__name__)


def before(config: RunConfig) -> Node:
    """Logs what the convolution costs. Returns: `conv_price` of the summary. Args: config: resolved."""
    conv_price = price(config)
    if conv_price is not None:
        log.info("%s", line(conv_price))
    return {"conv_price": conv_price}


def after(config: RunConfig, profiler: StepProfiler) -> Node:
    """`verdict` of the summary, if the run was long enough for one. Args: config: resolved."""
    if profiler.training_seconds <= _LONG_ENOUGH:
        return {}
    return {"verdict": verdict(profiler.shares(), config, num_cores())}


def explain(
    step: StepRecord,
    saves: bool,
    trainer: Trainer,
    module: LightningModule,
    statistics: RunningStatistics,
    folder: Path,
) -> str:
    """Sentences on a step whose gradient is not finite; all ranks take part. Args: as of `Diagnosis`."""
    return Diagnosis(trainer, module, statistics, folder).explain(step, saves)


def price(config: RunConfig) -> Node | None:
    """`ratio` to the time of `nn.Conv`, of all layers together, and the `layer` that adds most, by name.

    Forward and backward, without the compiler, are measured once on each machine. None: the network has
    `nn.Conv` alone, or its layers cannot be timed, which is logged.

    Args:
        config: resolved.
    """
    batch = config.data.batch_size or 1
    try:
        if _leaves_plain(config.conv, config.derived.spatial_dims):
            return None
        key = {
            "model": config.model,
            "conv": config.conv,
            "image": [batch, config.derived.num_channels, *config.derived.patch_size],
            "precision": config.trainer.precision,
            "switches": switches_of(config.perf),
        }
        # A run trains without this feature, too
        from medconv.features.autotune.measured_once import measured_once, measuring

        def measure() -> Node:
            with measuring(config):
                return _measure(config, batch)

        result, _ = measured_once(config, "conv_price", key, measure, _is_complete, shared=False)
    except Exception as error:  # of a user's layer: no reason to end a run that may train
        log.warning("conv: cannot be timed beside nn.Conv: %s", first_line(error))
        return None
    return {"ratio": result["ratio"], "layer": result["layer"]}


def line(price: Node) -> str:
    """As the log has it."""
    return (
        f"conv: {price['ratio']:.2f} times nn.Conv's time, forward and backward; {price['layer']} adds most "
        "(medconv bench-conv says why)"
    )


def _measure(config: RunConfig, batch: int) -> Node:
    accelerator = config.trainer.accelerator
    device = torch.device("cuda" if uses_gpu(accelerator) else "cpu")
    dtype = autocast_dtype(resolve_precision(config.trainer.precision or "auto", accelerator))
    sizes = NetworkSizes(config.model, config.derived, batch, device, switches_of(config.perf))
    with computing_in(device, dtype):
        layers = list(replaced_layers(sizes, config.conv))
        return conv_cost.price(layers, _SECONDS)


def _is_complete(result: Node) -> bool:
    return result["ratio"] > 0 and isinstance(result["layer"], str)


def _leaves_plain(node: Node, spatial_dims: int) -> bool:
    """Whether a convolution leaves each layer an `nn.Conv`, with other weights at most, as `smooth` does.

    Tried on one small layer, since nothing but the layer's class tells.
    """
    swap = configs.build({key: node[key] for key in node if key not in KEYS_OF_SWAP_CONVS}, "conv")
    if only_draws(swap):
        return True
    library = CONVS[spatial_dims - 1]
    network = nn.Sequential(library(4, 4, 3, padding=1))
    with torch.random.fork_rng([]), suppress(ValueError, TypeError):
        swap_convs(
            network, swap, spacing_mm=node.get("spacing_mm"), example=torch.zeros(2, 4, *[4] * spatial_dims)
        )
        return type(network[0]) is library
    return False  # it refuses this layer


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
        return f"{100 * network:.0f} % of the time was spent in the network itself: {advice}"
    largest = max(over, key=lambda phase: over[phase])
    limit = limits[largest]
    return f"{100 * over[largest]:.0f} % of the time {limit.verb}: {limit.advice}"


def _limits(config: RunConfig, cores: int) -> dict[str, _Limit]:
    return {
        "data_wait": _Limit(
            share=0.1,
            verb="was spent waiting for data",
            advice=_loader_advice(config.data.num_workers, config.trainer.devices, cores),
        ),
        "copy_to_device": _Limit(
            share=0.1,
            verb="was spent copying batches to the device",
            advice="try a smaller patch or batch; copies already use pinned memory",
        ),
        "augmentation": _Limit(
            share=0.15,
            verb="was spent on augmentation on the device",
            advice="try augmentation=light or augmentation=none",
        ),
        "logging": _Limit(
            share=0.1,
            verb="was spent on logging and callbacks",
            advice="try a larger trainer.log_every_n_steps, or callbacks=none",
        ),
        "validation": _Limit(
            share=0.3,
            verb="was spent on validation",
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
