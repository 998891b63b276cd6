"""Checks before resuming: a checkpoint must fit this run's task, network and optimizer."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from medconv.config import Derived, InitConfig, RunConfig
from medconv.utils.checkpoint_io import output_names


def check_same_task(content: Mapping[str, Any], derived: Derived, setting: str) -> None:
    """A checkpoint must have this run's channels, dimensions, and classes with the same names.

    Args: derived: values of this run. setting: the key and its value, for the message.
    Raises: ValueError: it differs; describes both.
    """
    trained, own = content["medconv"].get("config", {}).get("derived", {}), asdict(derived)
    alike = all(trained.get(key) == own[key] for key in ("spatial_dims", "num_channels", "num_classes"))
    if not alike or output_names(trained) != output_names(own) or _kind(trained) != _kind(own):
        raise ValueError(
            f"{setting}: a checkpoint of another task: it is for {_describe(trained)}, this run for "
            f"{_describe(own)}"
        )


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
    """Raises: ValueError: the checkpoint has reached the run's length already.

    Args: max_steps, max_epochs: -1: no limit. max_seconds: of training; None: no limit.
    """
    limits = {"steps": (content["global_step"], max_steps), "epochs": (content["epoch"], max_epochs)}
    for unit, (reached, limit) in limits.items():
        if 0 <= limit <= reached:
            raise ValueError(
                f"{setting}: was trained for {reached} {unit} already; trainer.max_{unit} must be more than "
                f"{reached} to train on from it, got {limit}"
            )
    budget = content.get("callbacks", {}).get("TimeBudget")
    if budget is None or max_seconds is None:
        return
    at_its_end = budget["total_steps"] is not None and budget["total_steps"] <= content["global_step"]
    if budget["spent"] >= max_seconds or (at_its_end and budget["seconds"] == max_seconds):
        raise ValueError(
            f"{setting}: was trained for {budget['spent']:.0f} of {budget['seconds']:.0f} seconds already; "
            f"trainer.max_time must be more to train on from it, got {max_seconds:.0f} seconds"
        )


def check_weights_fit(module: nn.Module, content: Mapping[str, Any], setting: str) -> None:
    """Raises: ValueError: names or sizes of the weights differ from this module's; names the first ones."""
    saved, own = content["state_dict"], module.state_dict()
    wrong = [f"{k} is missing in it" for k in own if k not in saved]
    wrong += [f"{k} is not in the network" for k in saved if k not in own]
    sizes = ((k, tuple(saved[k].shape), tuple(own[k].shape)) for k in own if k in saved)
    wrong += [f"{k} is {there} in it, here {here}" for k, there, here in sizes if there != here]
    if wrong:
        raise ValueError(f"{setting}: its weights do not fit this network: {'; '.join(wrong[:3])}")


def check_same_optimizer(content: Mapping[str, Any], config: RunConfig, setting: str, new_lr: bool) -> None:
    """An optimizer takes its settings from the checkpoint, so they must be those of this run.

    Args: new_lr: whether the schedule takes the learning rate from the config; else it goes on with that of
        the checkpoint, so it must be the same schedule.
    Raises: ValueError: the checkpoint holds the state of another optimizer, or its settings differ.
    """
    earlier, optimizer = content["medconv"].get("config", {}), config.optimizer
    saved, schedule = earlier.get("optimizer", optimizer), earlier.get("scheduler", config.scheduler)
    there, here = (node.get("_target_") for node in (schedule, config.scheduler))
    if not new_lr and there != here:
        raise _differs(setting, "scheduler._target_", there, here)
    for key in sorted({*saved, *optimizer} - ({"lr"} if new_lr else set())):
        there, here = (node.get(key, "its default") for node in (saved, optimizer))
        if there != here:
            raise _differs(setting, f"optimizer.{key}", there, here)


def check_same_freezing(content: Mapping[str, Any], init: InitConfig, setting: str) -> None:
    """Raises: ValueError: frozen parameters or learning rate multipliers differ from those of `init`."""
    saved = content["medconv"]["config"]["init"]
    for key in ("freeze", "lr_multipliers"):
        now = getattr(init, key)
        if (saved[key] or None) != (now or None):
            raise _differs(setting, f"init.{key}", saved[key], now)


def _differs(setting: str, key: str, there: Any, here: Any) -> ValueError:
    return ValueError(
        f"{setting}: was trained with {key}={there}, this run has {here}; use the same, or init.pretrained "
        "to start a new run from its weights"
    )


def _kind(derived: Mapping[str, Any]) -> Any:
    targets = derived.get("targets")
    return targets.get("kind") if isinstance(targets, Mapping) else None


def _describe(derived: Mapping[str, Any]) -> str:
    channels, outputs = derived.get("num_channels"), derived.get("num_classes")
    names = ", ".join(output_names(derived)) or "unnamed classes"
    kind = f"{_kind(derived)} " if _kind(derived) else ""
    images = f"{derived.get('spatial_dims')}D images of {channels} channel{'s'[: channels != 1]}"
    return f"{kind}{names} ({outputs} outputs) in {images}"
