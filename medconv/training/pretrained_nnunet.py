"""`init.pretrained=FOLDER` of a trained nnU-Net v2: its plans fill in the config, its weights are loaded."""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medconv.config import ConfigError, InitConfig, Node, RunConfig
from medconv.models.pretrained.hub import local_file
from medconv.models.pretrained.load import Origin
from medconv.models.unet import UNet
from medconv.training import nnunet_plans
from medconv.training.nnunet_plans import NnUNetModel, TrainedFold
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
    """A fold of a trained nnU-Net, and what its plans say."""

    fold: TrainedFold
    model: NnUNetModel


def find(init: InitConfig) -> PretrainedNnUNet | None:
    """The nnU-Net of `init.pretrained`; None: it is null, or a file.

    Raises:
        ValueError: a folder without plans and a checkpoint, or with what medconv does not support.
    """
    if init.pretrained is None or not Path(init.pretrained).is_dir():
        return None
    given = Path(init.pretrained)
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
    return PretrainedNnUNet(fold, nnunet_plans.read(folder, fold.configuration))


def file_of(init: InitConfig) -> tuple[Path, Origin | None]:
    """The file of weights of `init.pretrained`, which is not null, and what is known of an nnU-Net."""
    source = find(init)
    if source is None:
        return local_file(str(init.pretrained)), None
    return source.fold.path, Origin(source.model.axes, source.model.dataset.targets.names)


def with_plans(config: RunConfig) -> RunConfig:
    """The config with the network and the preprocessing of the nnU-Net of `init.pretrained`, if that is one.

    Keys of `data` and `plan` that are not null stay.

    Raises:
        ValueError: as `find`, or the config has another kind of network.
    """
    path = config.init.pretrained
    if path is not None and not Path(path).exists():
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
    settings = source.model.settings(mirror_axes=())
    data = {key: settings["data"][key] for key in _DATA_KEYS} | _normalisation(source.model)
    plan = {**settings["plan"], "size": "large"}
    new_data = _not_set(asdict(config.data), data)
    new_plan = _not_set(asdict(config.plan), plan)
    # A plain network has no residual blocks, whatever the option of `model`.
    new_model: Node = {"residual_blocks": None, **source.model.network.arguments}
    _announce(config, source, {"data": new_data, "plan": new_plan, "model": new_model})
    return replace(
        config,
        data=replace(config.data, **new_data),
        plan=replace(config.plan, **new_plan),
        model={**config.model, **new_model},
    )


def _normalisation(model: NnUNetModel) -> Node:
    """One name for any number of channels, unless they differ or have statistics of their own."""
    names = set(model.normalisation)
    if len(names) == 1 and not names & _MEASURED:
        return {"normalisation": model.normalisation[0]}
    return {"normalisation": list(model.normalisation), "intensities": list(model.intensities)}


def _not_set(values: Node, new_values: Node) -> Node:
    """The new values of keys that are null."""
    return {key: value for key, value in new_values.items() if values[key] is None and value is not None}


def _announce(config: RunConfig, source: PretrainedNnUNet, groups: dict[str, Node]) -> None:
    texts = []
    for group, values in groups.items():
        texts += [f"{group}.{key}={_text(value)}" for key, value in values.items() if value is not None]
    log.info(
        "init.pretrained=%s: %s of %s by %s sets %s",
        config.init.pretrained,
        source.fold.path.parent.name,
        source.model.dataset.name,
        source.fold.trainer_name,
        some(texts, len(texts)),
    )


def _text(value: Any) -> str:
    return str(value).replace(" ", "")
