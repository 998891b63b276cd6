"""The configured optimizer, fused where possible and with a learning rate per layer, and the schedule."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter, get_annotations, isclass, isfunction, signature

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from medconv import config as configs
from medconv.config import ConfigError, Node, TrainerConfig
from medconv.config.instantiate import class_of
from medconv.training.optim.lr_schedulers import ProgressSchedule

OptimizerFactory = Callable[..., Optimizer]  # takes parameters

log = logging.getLogger(__name__)


def build_optimizer(
    node: Node, trainer: TrainerConfig, fused: bool = True, thaws: bool = False
) -> OptimizerFactory:
    """The configured optimizer, fused if it can be.

    A fused optimizer cannot combine fp16's loss scaling with gradient clipping; torch's fused SGD cannot take
    weights sharded by FSDP, nor some that train later than others.

    Args:
        node: `optimizer` of the config.
        fused: whether it may be fused.
        thaws: whether some parameters train later, see `Thaw`.
    Returns:
        A function from parameters to the optimizer.
    """
    optimizer = configs.build(node, "optimizer")
    optimizer_class = getattr(optimizer, "func", optimizer)
    settings = getattr(optimizer, "keywords", {})
    clips_fp16 = bool(trainer.gradient_clip_val) and str(trainer.precision).startswith("16")
    refuses_sgd = (trainer.strategy == "fsdp" or thaws) and optimizer_class is torch.optim.SGD
    may_fuse = fused and not clips_fp16 and not refuses_sgd
    can_fuse = "fused" in signature(optimizer_class).parameters
    set_by_user = bool({"fused", "foreach"} & settings.keys())
    if may_fuse and can_fuse and not set_by_user:
        optimizer = partial(optimizer_class, **settings, fused=True)
    return partial(_made, configs.errors_with_key("optimizer", optimizer))


def _made(make: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> Optimizer:
    optimizer = make(parameters)
    optimizer.register_load_state_dict_post_hook(_laid_out_as_parameters)
    return optimizer


def _laid_out_as_parameters(optimizer: Optimizer) -> None:
    """Gives loaded states the strides of their parameters, which may have been others when they were saved.

    Kernels over all parameters at once pair what lies at one place in memory, whatever its index.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):  # an optimizer may keep more
            continue
        for name, value in state.items():
            is_like = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_like and not isinstance(value, DTensor) and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def with_epochs(node: Node, epochs: int | None) -> Node:
    """The node of a schedule; one of torch's that needs `T_max`, which counts epochs, gets those of the run.

    Args:
        node: `scheduler` of the config.
        epochs: of the run; None: a time or a number of steps ends it.
    Raises:
        ConfigError: `T_max` is missing, and the number of epochs is not known.
    """
    target = str(node.get("_target_"))
    made = schedule_class(node)
    if made is not None and issubclass(made, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler._target_={target} follows a metric, and schedules here do not; scheduler=plateau "
            "lowers the rate where validation stalls"
        )
    arguments = configs.arguments_of(target) or {}
    needs_length = "T_max" in arguments and arguments["T_max"].default is Parameter.empty
    if not needs_length or "T_max" in node:
        return node
    if epochs is None:
        raise ConfigError(
            f"scheduler.T_max is missing: {target} needs the number of epochs, which trainer.max_epochs "
            "tells where no max_time or max_steps may end the run sooner; scheduler=cosine also works with "
            "steps and times"
        )
    return {**node, "T_max": epochs}


def log_schedule(node: Node, with_length: Node) -> None:
    """Log what the user may not expect of a schedule.

    Args: with_length: the node as `with_epochs` returns it.
    """
    target = str(node.get("_target_"))
    made = schedule_class(node)
    if made is None:
        log.info(
            "scheduler: %s does not say what it returns, such as -> ProgressSchedule; patches do not grow",
            target,
        )
    elif issubclass(made, LRScheduler) and not issubclass(made, ProgressSchedule):
        log.info("scheduler: %s moves once per epoch, not per step", target)
    if with_length is not node:
        log.info("scheduler.T_max: %d epochs, the length of the run", with_length["T_max"])


def schedule_class(node: Node) -> type | None:
    """The class of a schedule, as its function is annotated to return it; None: not known.

    So it is known before there are parameters to train, of which schedules are made.
    Args: node: `scheduler` of the config.
    """
    made = class_of(str(node.get("_target_")))
    if isfunction(made):
        with suppress(NameError):  # a name that is imported for type checkers alone
            made = get_annotations(made, eval_str=True).get("return")
    return made if isclass(made) else None


def knows_progress(node: Node) -> bool:
    """Whether a schedule is a `ProgressSchedule`, which knows how much of the run is done."""
    made = schedule_class(node)
    return made is not None and issubclass(made, ProgressSchedule)


def with_lr_multipliers(
    make_optimizer: Callable[..., Optimizer], network: nn.Module, multipliers: Mapping[str, float]
) -> Callable[..., Optimizer]:
    """Like `make_optimizer`, but the optimizer has a parameter group for each learning rate multiplier.

    It works with any optimizer and schedule: groups store their factor as `lr_multiplier`, and a schedule
    takes their learning rates as base.

    Args:
        multipliers: regular expression on parameter names to factor; the first match counts, else 1.
    """

    def make_grouped_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        # Looked up here, since FSDP replaces the parameters
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            multiplier = _multiplier(names.get(id(parameter)), multipliers)
            groups.setdefault(multiplier, []).append(parameter)
        optimizer = make_optimizer(
            [{"params": group, "lr_multiplier": multiplier} for multiplier, group in groups.items()]
        )
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_multiplier"]
        return optimizer

    return make_grouped_optimizer


def _multiplier(name: str | None, multipliers: Mapping[str, float]) -> float:
    """Args: name: of a parameter; None: it is not one of the network, such as a head's."""
    if name is not None:
        for pattern, multiplier in multipliers.items():
            if re.search(pattern, name):
                return multiplier
    return 1.0
