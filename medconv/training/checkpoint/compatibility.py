"""Checks before resuming: a checkpoint must fit this run's task, network and optimizer."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from medconv.config import Derived, InitConfig, RunConfig
from medconv.utils.checkpoint_io import channel_order, output_names


def check_same_task(content: Mapping[str, Any], derived: Derived, setting: str) -> None:
    """A checkpoint must have this run's channels, dimensions, and classes with the same names.

    Args:
        setting: the key and its value, for the message.
    Raises:
        ValueError: it differs; describes both.
    """
    trained = content["medconv"].get("config", {}).get("derived", {})
    current = asdict(derived)
    same_sizes = all(
        trained.get(key) == current[key] for key in ("spatial_dims", "num_channels", "num_classes")
    )
    same_names = output_names(trained) == output_names(current)
    same_kind = _kind(trained) == _kind(current)
    if not (same_sizes and same_names and same_kind):
        raise ValueError(
            f"{setting}: a checkpoint of another task: it is for {_describe(trained)}, this run for "
            f"{_describe(current)}"
        )
    if channel_order(content["medconv"], derived.modalities):
        saved = ", ".join(content["medconv"]["modalities"])
        own = ", ".join(derived.modalities or ())
        raise ValueError(f"{setting}: its channels are {saved}, here in another order: {own}")


def check_has_training_state(content: Mapping[str, Any], setting: str) -> None:
    """Raises: ValueError: the checkpoint has weights only, like the one saved with a non-finite batch."""
    if not {"loops", "optimizer_states", "lr_schedulers", "global_step"} <= set(content):
        raise ValueError(
            f"{setting}: holds weights, but no training state; use a file in the run's checkpoints/, or "
            "init.pretrained to start a new run from these weights"
        )


def check_not_finished(
    content: Mapping[str, Any], max_steps: int, max_epochs: int, max_seconds: float | None, setting: str
) -> None:
    """A checkpoint must not have reached the run's length already.

    Args:
        max_steps: -1: no limit.
        max_epochs: -1: no limit.
        max_seconds: of training; None: no limit.
        setting: the key and its value, for the message.
    Raises:
        ValueError: it has reached the length.
    """
    _check_below(content["global_step"], max_steps, "steps", setting)
    _check_below(content["epoch"], max_epochs, "epochs", setting)
    budget = content.get("callbacks", {}).get("TimeBudget")
    if budget is None or max_seconds is None:
        return
    # The steps that fitted into the time have been done
    has_taken_all_steps = (
        budget["total_steps"] is not None and budget["total_steps"] <= content["global_step"]
    )
    same_budget = budget["seconds"] == max_seconds
    if budget["spent"] >= max_seconds or (has_taken_all_steps and same_budget):
        raise ValueError(
            f"{setting}: was trained for {budget['spent']:.0f} of {budget['seconds']:.0f} seconds already; "
            f"trainer.max_time must be more to continue from it, got {max_seconds:.0f} seconds"
        )


def _check_below(reached: int, limit: int, unit: str, setting: str) -> None:
    if 0 <= limit <= reached:
        raise ValueError(
            f"{setting}: was trained for {reached} {unit} already; trainer.max_{unit} must be more than "
            f"{reached} to continue from it, got {limit}"
        )


def check_weights_fit(module: nn.Module, content: Mapping[str, Any], setting: str) -> None:
    """Raises: ValueError: names or sizes of the weights differ from this module's; names the first ones."""
    saved = content["state_dict"]
    current = module.state_dict()
    differences = [f"{name} is missing in it" for name in current if name not in saved]
    differences += [f"{name} is not in the network" for name in saved if name not in current]
    for name, tensor in current.items():
        if name in saved and saved[name].shape != tensor.shape:
            sizes = f"{tuple(saved[name].shape)} in it, here {tuple(tensor.shape)}"
            differences.append(f"{name} is {sizes}")
    if differences:
        raise ValueError(f"{setting}: its weights do not fit this network: {'; '.join(differences[:3])}")


def check_same_optimizer(content: Mapping[str, Any], config: RunConfig, setting: str, new_lr: bool) -> None:
    """An optimizer takes its settings from the checkpoint, so they must be those of this run.

    Args:
        setting: the key and its value, for the message.
        new_lr: whether the schedule takes the learning rate from the config; else it goes on with that of
            the checkpoint, so it must be the same schedule. Both must count steps.
    Raises:
        ValueError: the checkpoint holds the state of another optimizer, or its settings differ.
    """
    saved_config = content["medconv"].get("config", {})
    optimizer = config.optimizer
    saved_optimizer = saved_config.get("optimizer", optimizer)
    schedule = config.scheduler.get("_target_")
    saved_schedule = saved_config.get("scheduler", config.scheduler).get("_target_")
    counts_steps = all("progress" in state for state in content.get("lr_schedulers", ()))
    if saved_schedule != schedule and not (new_lr and counts_steps):  # torch's own count epochs
        raise _differs(setting, "scheduler._target_", saved_schedule, schedule)
    compared = {*saved_optimizer, *optimizer}
    if new_lr:
        compared -= {"lr"}
    for key in sorted(compared):
        saved_value = saved_optimizer.get(key, "its default")
        value = optimizer.get(key, "its default")
        if saved_value != value:
            raise _differs(setting, f"optimizer.{key}", saved_value, value)


def check_same_sharding(content: Mapping[str, Any], strategy: str, setting: str) -> None:
    """FSDP numbers the optimizer's state by the parameters of the network, others by those of the optimizer.

    Raises: ValueError: only this run, or only that of the checkpoint, has FSDP.
    """
    saved_strategy = content["medconv"]["config"].get("trainer", {}).get("strategy")
    if "fsdp" in (saved_strategy, strategy) and saved_strategy != strategy:
        raise _differs(setting, "trainer.strategy", saved_strategy, strategy)


def check_same_freezing(content: Mapping[str, Any], init: InitConfig, setting: str) -> None:
    """Raises: ValueError: frozen parameters or learning rate multipliers differ from those of `init`."""
    saved_init = content["medconv"]["config"]["init"]
    for key in ("freeze", "lr_multipliers", "thaw_at"):
        value = getattr(init, key)
        saved_value = saved_init[key]
        if (saved_value or None) != (value or None):  # empty is null
            raise _differs(setting, f"init.{key}", saved_value, value)


def _differs(setting: str, key: str, saved: Any, current: Any) -> ValueError:
    return ValueError(
        f"{setting}: was trained with {key}={saved}, this run has {current}; use the same, or "
        "init.pretrained to start a new run from its weights"
    )


def _kind(derived: Mapping[str, Any]) -> Any:
    targets = derived.get("targets")
    return targets.get("kind") if isinstance(targets, Mapping) else None


def _describe(derived: Mapping[str, Any]) -> str:
    channels = derived.get("num_channels")
    outputs = derived.get("num_classes")
    names = ", ".join(output_names(derived)) or "unnamed classes"
    kind = f"{_kind(derived)} " if _kind(derived) else ""
    plural = "" if channels == 1 else "s"
    images = f"{derived.get('spatial_dims')}D images of {channels} channel{plural}"
    return f"{kind}{names} ({outputs} outputs) in {images}"
