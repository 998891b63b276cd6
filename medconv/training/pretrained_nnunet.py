"""`init.pretrained` of nnU-Net v2 (a folder) or nnssl (a file): its plans fill in the config, its weights are
loaded.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medconv.config import ConfigError, InitConfig, Node, RunConfig
from medconv.models.pretrained.hub import is_remote, local_file
from medconv.models.pretrained.load import Origin
from medconv.models.unet import UNet
from medconv.training import nnssl_plan, nnunet_plans
from medconv.utils.logging import some

_CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
_UNET = f"medconv.models.{UNet.__name__}"
# What the network was trained on; batch size and mirrored axes follow from this run.
_DATA_KEYS = ("spatial_dims", "slice_axis", "spacing_mm", "patch_size", "convention")
# Normalisations that need statistics of each channel.
_MEASURED = {"ct", "dataset"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PretrainedNnUNet:
    """A network of nnU-Net or nnssl.

    Args:
        path: of its weights.
        description: for messages.
        settings: what its plans set: the groups `data`, `plan` and `model` of a config, with their keys.
    """

    path: Path
    origin: Origin
    description: str
    settings: dict[str, Node]


def find(init: InitConfig) -> PretrainedNnUNet | None:
    """The network of `init.pretrained`; None: it is null, or a file without plans.

    Raises:
        ValueError: a folder without plans and a checkpoint, or with what medconv does not support.
    """
    if init.pretrained is None:
        return None
    path = Path(init.pretrained)
    if path.is_dir():
        return _of_folder(path)
    # A run that is resumed no longer needs its file, and another one fails where it is loaded; safetensors
    # hold tensors alone
    has_plan = path.is_file() and path.suffix != ".safetensors"
    return _of_nnssl(path) if has_plan else None


def _of_nnssl(path: Path) -> PretrainedNnUNet | None:
    plan = nnssl_plan.read(path)
    if plan is None:
        return None
    data: Node = {"spatial_dims": 3, **_normalisation(plan.normalisation)}
    if plan.spacing_mm is not None:
        data["spacing_mm"] = list(nnunet_plans.ours(plan.spacing_mm, plan.axes))
    return PretrainedNnUNet(
        path=path,
        # Pretraining without labels predicts no class, so the head begins anew
        origin=Origin(plan.axes, ()),
        description=f"{plan.architecture}, pretrained on {plan.dataset},",
        settings={
            "data": data,
            "plan": nnunet_plans.plan_keys(plan.network, plan.axes),
            "model": plan.network.arguments,
        },
    )


def _of_folder(given: Path) -> PretrainedNnUNet:
    # The folder of the configuration, or of one of its folds.
    is_fold = given.name.startswith("fold_")
    folder = given.parent if is_fold else given
    folds = [given] if is_fold else sorted(folder.glob("fold_*"))
    files = [fold / name for fold in folds for name in _CHECKPOINTS if (fold / name).is_file()]
    if not files or not (folder / "plans.json").is_file():
        raise ConfigError(
            f"init.pretrained={given}: a folder must be that of a trained nnU-Net v2 configuration, with "
            f"plans.json, dataset.json and fold_N/{_CHECKPOINTS[0]}"
        )
    fold = nnunet_plans.read_checkpoint(files[0])
    model = nnunet_plans.read(folder, fold.configuration)
    settings = model.settings(mirror_axes=())
    data = {key: settings["data"][key] for key in _DATA_KEYS}
    return PretrainedNnUNet(
        path=fold.path,
        origin=Origin(model.axes, model.dataset.targets.names),
        description=f"{fold.path.parent.name} of {model.dataset.name} by {fold.trainer_name}",
        settings={
            "data": data | _normalisation(model.normalisation, model.intensities),
            "plan": settings["plan"],
            "model": settings["model"],
        },
    )


def file_of(init: InitConfig) -> tuple[Path, Origin | None]:
    """The file of weights of `init.pretrained`, which is not null, and what is known of its network."""
    source = find(init)
    if source is None:
        return local_file(str(init.pretrained)), None
    return source.path, source.origin


def with_plans(config: RunConfig) -> RunConfig:
    """The config with the network and the preprocessing of `init.pretrained`, if its plans are known.

    Keys of `data` and `plan` that are not null stay.

    Raises:
        ValueError: as `find`, or the config has another kind of network.
    """
    path = config.init.pretrained
    if path is not None and not is_remote(path) and not Path(path).exists():
        log.warning(
            "init.pretrained=%s: no such file or folder; a stopped run resumes without a file, but the "
            "folder of a trained nnU-Net also holds its plans",
            path,
        )
    source = find(config.init)
    if source is None:
        return config
    target = config.model.get("_target_")
    if target != _UNET:
        raise ConfigError(
            f"init.pretrained={config.init.pretrained}: nnU-Net's network is one of model=customconv or "
            f"resenc, got {target}"
        )
    data = source.settings["data"]
    plan = {**source.settings["plan"], "size": "large"}
    new_data = _not_set(asdict(config.data), data)
    new_plan = _not_set(asdict(config.plan), plan)
    # A plain network has no residual blocks, whatever the option of `model`.
    new_model: Node = {"residual_blocks": None, **source.settings["model"]}
    _announce(config, source, {"data": new_data, "plan": new_plan, "model": new_model})
    return replace(
        config,
        data=replace(config.data, **new_data),
        plan=replace(config.plan, **new_plan),
        model={**config.model, **new_model},
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


def _announce(config: RunConfig, source: PretrainedNnUNet, groups: dict[str, Node]) -> None:
    texts = []
    for group, values in groups.items():
        texts += [f"{group}.{key}={_text(value)}" for key, value in values.items() if value is not None]
    log.info(
        "init.pretrained=%s: %s sets %s", config.init.pretrained, source.description, some(texts, len(texts))
    )


def _text(value: Any) -> str:
    return str(value).replace(" ", "")
