"""The size of a plan for `trainer.max_time`: the largest of which enough steps fit, by measured steps."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from medconv import config as configs
from medconv.config import ConfigError, Derived, Node, RunConfig
from medconv.features.autotune.measured_once import kept_random_state, measured_once, measuring
from medconv.features.autotune.trial import Choice, Trial, Work
from medconv.models.build import PLAIN_CONV, build_network
from medconv.models.outputs import heads
from medconv.planning.limits import SIZES
from medconv.planning.planner import Plan
from medconv.planning.topology import Budget
from medconv.targets import Targets
from medconv.training.distributed import batches_per_step
from medconv.training.growing_patch import growing_patch_of
from medconv.training.optim.muon import Muon
from medconv.utils.hardware import out_of_memory, resolve_precision, uses_gpu
from medconv.utils.logging import size_text

_TRAINING = 0.85  # share of the time for steps; the rest is for validation
_QUICK = 0.5  # seconds in which a third step is timed
_BUSY = 1.25  # times its time on a core, beyond which a step was slowed by other work

log = logging.getLogger(__name__)


class Planned(Protocol):
    """Makes the plan of a size."""

    def __call__(self, size: str, origin: str, warns: bool = True) -> Plan:
        """Args: origin: why this size. warns: of what is doubtful; False: the plan is only compared."""


def size_for_time(
    config: RunConfig, planned: Planned, derive: Callable[[Plan], Derived], budget: Budget
) -> Plan:
    """The plan of the largest size of which enough steps fit into `trainer.max_time`.

    A size is measured once for a machine, with the network of the config and plain convolutions.

    Args:
        config: of the run.
        derive: what the config's nodes use of a plan.
        budget: its precision and checkpointing count.
    Raises:
        ValueError: as `planned`, of the smallest size.
        ConfigError: as `build_network`.
    """
    plans = _plans(planned, _sizes_for(config.trainer.accelerator))
    if len(plans) == 1:
        return planned(next(iter(plans)), "the config sets all that a size decides")
    refused = {}  # size to the error of its network
    seconds = _TRAINING * (config.trainer.max_seconds or math.inf)

    @cache
    def measured_step(name: str) -> Step | None:
        size_plan = plans[name]
        if size_plan is None:
            return Step(math.inf)
        try:
            return _measured_step(config, size_plan, derive(size_plan), budget)
        except ConfigError as error:
            refused[name] = error
            return None

    def step_seconds(name: str) -> float | None:
        step = measured_step(name)
        size_plan = plans[name]
        if step is None or size_plan is None:
            return None if step is None else math.inf
        return step.seconds * batches_per_step(config, size_plan.batch_size)

    grids = {name: f"{size_text(plan.spacing_mm, 3)} mm" for name, plan in plans.items() if plan is not None}
    name, larger = largest(plans, step_seconds, seconds, grids)
    if not name:
        tried, error = next(iter(refused.items()))
        raise ConfigError(f"{error} (plan.size={tried}, and so for the others)") from error
    step = measured_step(name)
    chosen = plans[name]
    assert step is not None and chosen is not None
    num_steps, growing = _steps_in_time(config, chosen, derive(chosen), step)
    grows = ", as patches grow," if growing else ""
    return planned(name, f"about {num_steps:.0f} steps{grows} fit into trainer.max_time{larger}")


def steps_in_time(config: RunConfig, size_plan: Plan, derived: Derived) -> float:
    """How many steps of a plan fit into `trainer.max_time`, by a measured one.

    Raises: ConfigError: as `build_network`.
    """
    checkpointing = config.perf.activation_checkpointing or "none"
    precision = resolve_precision(config.trainer.precision or "auto", config.trainer.accelerator)
    budget = Budget(precision=precision, activation_checkpointing=checkpointing)
    step = _measured_step(config, size_plan, derived, budget)
    return _steps_in_time(config, size_plan, derived, step)[0]


def largest(
    names: Iterable[str],
    step_seconds: Callable[[str], float | None],
    seconds: float,
    grids: Mapping[str, str],
) -> tuple[str, str]:
    """The largest size of which enough steps on whole patches fit, or the smallest; empty if there is none.

    And what the next larger one would need, as the end of a sentence.

    Args:
        names: of sizes, smallest first.
        step_seconds: of a size; asked from the smallest up, until one has too few steps. None: the network
            cannot have this size.
        seconds: for all steps.
        grids: size to the spacing of its plan, as text; one that more time would buy is named.
    """
    chosen = ""
    for name in names:
        step = step_seconds(name)
        if step is None:
            continue
        needed_seconds = SIZES[name].enough_steps * step
        if not chosen or seconds >= needed_seconds:
            chosen = name
        elif math.isfinite(step):
            minutes = _rounded_up(needed_seconds / _TRAINING / 60)
            finer = "" if grids.get(name) == grids.get(chosen) else f" at {grids[name]}"
            return chosen, f"; size {name}{finer} ({step:.2g} s a step) needs at least {minutes} minutes"
        else:
            return chosen, f"; size {name} does not fit into memory"
    return chosen, ""


def _rounded_up(minutes: float) -> str:
    if minutes > 10:
        return f"{math.ceil(minutes)}"
    return f"{math.ceil(10 * minutes) / 10:g}"


def _sizes_for(accelerator: str) -> list[str]:
    """Smallest first; a CPU has no memory for patches that see enough on the images' own grid."""
    return [name for name, size in reversed(SIZES.items()) if size.coarsens or uses_gpu(accelerator)]


def _plans(planned: Planned, sizes: Sequence[str]) -> dict[str, Plan | None]:
    """The plans of the sizes that differ from that of the next smaller one; None: fits into no memory."""
    smallest, *larger = sizes
    previous = planned(smallest, "", warns=False)
    plans: dict[str, Plan | None] = {smallest: previous}
    for name in larger:
        try:
            size_plan = planned(name, "", warns=False)
        except ValueError:
            plans[name] = None
            continue
        if {**size_plan.values(), "size": ""} != {**previous.values(), "size": ""}:
            plans[name] = size_plan
            previous = size_plan
    return plans


class Step(NamedTuple):
    """A training step of a plan on whole patches.

    Args:
        seconds: infinite if it does not fit into memory.
        divisor: of the network's input; None: it does not tell.
    """

    seconds: float
    divisor: list[int] | None = None


def _steps_in_time(config: RunConfig, size_plan: Plan, derived: Derived, step: Step) -> tuple[float, bool]:
    """Also whether patches grow, which makes most steps cheaper."""
    seconds = _TRAINING * (config.trainer.max_seconds or math.inf)
    num_steps = seconds / (step.seconds * batches_per_step(config, size_plan.batch_size))
    growing = growing_patch_of(configs.with_derived(config, derived), step.divisor)
    if growing is None:
        return num_steps, False
    return num_steps * float((1 / growing.costs(size_plan.patch_size)).mean()), True


def _measured_step(config: RunConfig, plan: Plan, derived: Derived, budget: Budget) -> Step:
    model = Targets.from_plain(derived.targets).model(configs.with_derived(config, derived).model)
    key = {
        "model": model,
        "image": [plan.batch_size, derived.num_channels, *plan.patch_size],
        "precision": [budget.precision, budget.activation_checkpointing],
    }

    @cache
    def network() -> nn.Module:  # built on all ranks, which so have the same errors
        with kept_random_state(config.trainer.accelerator):
            return build_network(model, PLAIN_CONV, derived)

    def measure() -> Node:
        log.info("plan.size: measuring a step of size %s", plan.size)
        with measuring(config):
            try:
                timing = _timed(_trial(config, network(), plan, derived, budget))
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                timing = Timing(math.inf, math.inf)
        # A thread may sleep while it waits for a GPU
        if timing.is_busy and not uses_gpu(config.trainer.accelerator):
            log.warning(
                "this machine is busy: a step of size %s took %.2g s, %.2g s of them on a core; this plan "
                "counts the first, and later runs measure again",
                plan.size,
                timing.seconds,
                timing.core_seconds,
            )
        divisor = getattr(network(), "divisor", None)
        return {**timing._asdict(), "divisor": None if divisor is None else list(divisor)}

    def complete(result: Node) -> bool:
        return result["seconds"] > 0 and {"core_seconds", "divisor"} <= set(result)

    def holds(result: Node) -> bool:
        timing = Timing(result["seconds"], result["core_seconds"])
        return uses_gpu(config.trainer.accelerator) or not timing.is_busy

    result, _ = measured_once(config, "step_seconds", key, measure, complete, network, holds=holds)
    return Step(result["seconds"], result["divisor"])


def _trial(config: RunConfig, network: nn.Module, plan: Plan, derived: Derived, budget: Budget) -> Trial:
    """A step of the plan on random images."""
    device = torch.device("cuda" if uses_gpu(config.trainer.accelerator) else "cpu")
    label_shape = plan.patch_size if derived.per_voxel else ()
    image = torch.randn(plan.batch_size, derived.num_channels, *plan.patch_size, device=device)
    label = torch.zeros(plan.batch_size, *label_shape, dtype=torch.long, device=device)

    def loss(output: Tensor | Sequence[Tensor], label: Tensor) -> Tensor:
        return functional.cross_entropy(heads(output, plan.spatial_dims)[0].float(), label)

    work = Work(network=network, objective=loss, optimizer=Muon, image=image, label=label)
    choice = Choice(
        precision=budget.precision,
        channels_last=True,
        fast_norm=True,
        fast_depthwise=True,
        activation_checkpointing=budget.activation_checkpointing,
    )
    return Trial(work, choice)


class Timing(NamedTuple):
    """A measured step.

    Args:
        core_seconds: in which the thread that runs the step was on a core; it takes part in all the work of
            a CPU, so the rest is time that other processes had.
    """

    seconds: float
    core_seconds: float

    @property
    def is_busy(self) -> bool:
        """Whether other work made the step slower."""
        return self.seconds > _BUSY * self.core_seconds


def _timed(trial: Trial) -> Timing:
    """The fastest step of the second and third, or of three quick ones.

    Other work on the machine makes steps slower, never faster.
    """
    trial.step()
    timings: list[Timing] = []
    while len(timings) < 2 or (len(timings) < 3 and sum(timing.seconds for timing in timings) < _QUICK):
        start = time.perf_counter()
        core_start = time.thread_time()
        float(trial.step())  # waits for a GPU
        timings.append(Timing(time.perf_counter() - start, time.thread_time() - core_start))
    return min(timings)
