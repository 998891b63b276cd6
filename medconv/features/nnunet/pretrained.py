"""`init.pretrained` of nnU-Net v2 (a folder) or nnssl (a file): its plans fill in the config, its weights are
loaded.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from medconv.config import ConfigError, Derived, Node, RunConfig
from medconv.features.nnunet import nnssl, plans
from medconv.features.pretrained.hub import is_remote, local_file
from medconv.features.pretrained.load import Origin, Report
from medconv.features.pretrained.source import load_weights
from medconv.models.unet import UNet
from medconv.utils.logging import some

_CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
_UNET = f"medconv.models.{UNet.__name__}"
# What the network was trained on; batch size and mirrored axes follow from this run.
_DATA_KEYS = ("spatial_dims", "slice_axis", "spacing_mm", "patch_size", "convention")
# Normalisations that need statistics of each channel.
_MEASURED = {"ct", "dataset"}
log = logging.getLogger(__name__)


def find(name: str) -> "PretrainedNnUNet | None":
    """The network that `init.pretrained` names; None: a file without plans.

    Raises:
        ValueError: a folder without plans and a checkpoint, or with what medconv does not support; or the Hub
            does not give the file.
    """
    if Path(name).is_dir():
        return _of_folder(Path(name))
    # safetensors hold tensors alone, and need not be downloaded to know that
    file = name.partition("@")[0] if is_remote(name) else name
    if file.endswith(".safetensors"):
        return None
    path = local_file(name)
    return _of_nnssl(name, path) if path.is_file() else None


@dataclass(frozen=True)
class PretrainedNnUNet:
    """A network of nnU-Net or nnssl.

    Args:
        name: as `init.pretrained` names it.
        path: of its weights.
        description: for messages.
        groups: what its plans set: the groups `data`, `plan` and `model` of a config, with their keys.
    """

    name: str
    path: Path
    origin: Origin
    description: str
    groups: dict[str, Node]

    def settings(self, config: RunConfig) -> RunConfig:
        """The config with this network and its preprocessing; what `data` and `plan` set already stays.

        Raises:
            ConfigError: the config has another kind of network.
        """
        target = config.model.get("_target_")
        if target != _UNET:
            raise ConfigError(
                f"init.pretrained={self.name}: nnU-Net's network is one of model=customconv or resenc, got "
                f"{target}"
            )
        new_data = _not_set(asdict(config.data), self.groups["data"])
        new_plan = _not_set(asdict(config.plan), {**self.groups["plan"], "size": "large"})
        # A plain network has no residual blocks, whatever the option of `model`.
        new_model: Node = {"residual_blocks": None, **self.groups["model"]}
        self._announce({"data": new_data, "plan": new_plan, "model": new_model})
        return replace(
            config,
            data=replace(config.data, **new_data),
            plan=replace(config.plan, **new_plan),
            model={**config.model, **new_model},
        )

    def earlier_plan(self, config: RunConfig) -> None:
        """None: `settings` has put the plan into the config."""

    def load(self, network: nn.Module, config: RunConfig, derived: Derived) -> Report:
        """Overwrites the tensors of a network for which this one has some. Raises: ValueError: as `load`."""
        return load_weights(network, self.path, config, derived, self.origin)

    def _announce(self, groups: dict[str, Node]) -> None:
        texts = []
        for group, values in groups.items():
            texts += [f"{group}.{key}={_text(value)}" for key, value in values.items() if value is not None]
        log.info("init.pretrained=%s: %s sets %s", self.name, self.description, some(texts, len(texts)))


def _of_nnssl(name: str, path: Path) -> PretrainedNnUNet | None:
    plan = nnssl.read(path)
    if plan is None:
        return None
    data: Node = {"spatial_dims": 3, **_normalisation(plan.normalisation)}
    if plan.spacing_mm is not None:
        data["spacing_mm"] = list(plans.ours(plan.spacing_mm, plan.axes))
    return PretrainedNnUNet(
        name=name,
        path=path,
        # Pretraining without labels predicts no class, so the head begins anew
        origin=Origin(plan.axes, ()),
        description=f"{plan.architecture}, pretrained on {plan.dataset},",
        groups={
            "data": data,
            "plan": plans.plan_keys(plan.network, plan.axes),
            "model": plan.network.arguments,
        },
    )


def _of_folder(given: Path) -> PretrainedNnUNet:
    # The folder of the configuration, or of one of its folds.
    is_fold = given.name.startswith("fold_")
    folder = given.parent if is_fold else given
    folds = [given] if is_fold else sorted(folder.glob("fold_*"))
    files = [fold / name for fold in folds for name in _CHECKPOINTS if (fold / name).is_file()]
    if (given / "checkpoints").is_dir():
        raise ConfigError(
            f"init.pretrained={given}: the folder of a run; name its weights, {given}/checkpoints/best.ckpt"
        )
    if not files or not (folder / "plans.json").is_file():
        raise ConfigError(
            f"init.pretrained={given}: a folder must be that of a trained nnU-Net v2 configuration, with "
            f"plans.json, dataset.json and fold_N/{_CHECKPOINTS[0]}"
        )
    fold = plans.read_checkpoint(files[0])
    model = plans.read(folder, fold.configuration)
    settings = model.settings(mirror_axes=())
    data = {key: settings["data"][key] for key in _DATA_KEYS}
    return PretrainedNnUNet(
        name=str(given),
        path=fold.path,
        origin=Origin(model.axes, model.dataset.targets.names),
        description=f"{fold.path.parent.name} of {model.dataset.name} by {fold.trainer_name}",
        groups={
            "data": data | _normalisation(model.normalisation, model.intensities),
            "plan": settings["plan"],
            "model": settings["model"],
        },
    )


def _normalisation(names: Sequence[str], intensities: Sequence[Mapping[str, float]] = ()) -> Node:
    """One name for any number of channels, unless they differ or have statistics of their own.

    Args:
        names: of each channel.
        intensities: of each channel; empty: this run measures them.
    """
    if len(set(names)) == 1 and not set(names) & _MEASURED:
        return {"normalisation": names[0]}
    return {"normalisation": list(names), "intensities": list(intensities) or None}


def _not_set(values: Node, new_values: Node) -> Node:
    """The new values of keys that are null."""
    return {key: value for key, value in new_values.items() if values[key] is None and value is not None}


def _text(value: Any) -> str:
    return str(value).replace(" ", "")
