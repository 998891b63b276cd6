"""Checks before resuming: a checkpoint must fit this run's task, network and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from medconv.utils.checkpoint_io import output_names


def check_same_task(content: Mapping[str, Any], derived: Mapping[str, Any], given: str) -> None:
    """Whether a checkpoint is of a task like this run's, which `derived` describe; its classes must be called
    the same.

    Args: given: the key and what it was set to.
    Raises: ValueError: it is not; names both.
    """
    theirs = content["medconv"].get("config", {}).get("derived", {})
    alike = all(theirs.get(key) == derived[key] for key in ("spatial_dims", "num_channels", "num_classes"))
    if not alike or output_names(theirs) != output_names(derived) or _kind(theirs) != _kind(derived):
        raise ValueError(
            f"{given}: a checkpoint of another task: it is for {_words(theirs)}, this run for "
            f"{_words(derived)}"
        )


def check_has_training_state(content: Mapping[str, Any], given: str) -> None:
    """Raises: ValueError: a checkpoint without what a run goes on from, such as the one of a single batch."""
    if not {"loops", "optimizer_states", "lr_schedulers", "global_step"} <= set(content):
        raise ValueError(
            f"{given}: holds weights, but not where a run stood; take one of its checkpoints/, or "
            "init.pretrained to begin anew from these weights"
        )


def check_weights_fit(module: nn.Module, content: Mapping[str, Any], given: str) -> None:
    """Raises: ValueError: a checkpoint's weights are not those of this module; names the first that
    differ.
    """
    theirs, own = content["state_dict"], module.state_dict()
    wrong = [f"{k} is not in it" for k in own if k not in theirs] + [
        f"{k} is too many" for k in theirs if k not in own
    ]
    sizes = ((k, tuple(theirs[k].shape), tuple(own[k].shape)) for k in own if k in theirs)
    wrong += [f"{k} is {there} in it, here {here}" for k, there, here in sizes if there != here]
    if wrong:
        raise ValueError(f"{given}: its weights do not fit this network: {'; '.join(wrong[:3])}")


def check_same_optimizer(content: Mapping[str, Any], target: str, given: str) -> None:
    """Raises: ValueError: a checkpoint's optimizer state is that of another kind of optimizer."""
    theirs = str(content["medconv"].get("config", {}).get("optimizer", {}).get("_target_", target))
    if theirs != target:
        raise ValueError(
            f"{given}: was trained by optimizer._target_={theirs}, this run has {target}; take the same "
            "optimizer, or init.pretrained to begin anew from its weights"
        )


def check_same_freezing(content: Mapping[str, Any], init: Mapping[str, Any], given: str) -> None:
    """Raises: ValueError: other parameters were frozen, or learned at other rates, than `init` says."""
    theirs = content["medconv"]["config"]["init"]
    for key in ("freeze", "lr_multipliers"):
        if (theirs[key] or None) != (init[key] or None):
            raise ValueError(
                f"{given}: was trained with init.{key}={theirs[key]}, this run has {init[key]}; take the "
                "same, or init.pretrained to begin anew from its weights"
            )


def _kind(derived: Mapping[str, Any]) -> Any:
    """Of outcome; None: label maps."""
    image_targets = derived.get("image_targets")
    return image_targets.get("kind") if isinstance(image_targets, Mapping) else None


def _words(derived: Mapping[str, Any]) -> str:
    channels, outputs = derived.get("num_channels"), derived.get("num_classes")
    names = ", ".join(output_names(derived)) or "nothing that it names"
    kind = f"{_kind(derived)} " if _kind(derived) else ""
    images = f"{derived.get('spatial_dims')}D images of {channels} channel{'s'[: channels != 1]}"
    return f"{kind}{names} ({outputs} outputs) in {images}"
