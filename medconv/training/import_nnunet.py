"""`medconv import-nnunet`: a trained nnU-Net v2 model becomes a run folder for each of its folds."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from medconv import config as configs
from medconv.config import Node, RunConfig
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.data.preprocessing.store import Store
from medconv.models.build import build_network
from medconv.models.pretrained.nnunet import unet_weights
from medconv.planning.memory_model import Budget
from medconv.planning.planner import Plan
from medconv.training import nnunet_plans
from medconv.training.build import record_of
from medconv.training.data_setup import PreparedData
from medconv.training.nnunet_plans import DAMAGED, NnUNetModel
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import replacing, write_text
from medconv.utils.errors import explained
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import some, start_logging

log = logging.getLogger(__name__)


def run_command(options: argparse.Namespace) -> int:
    """`medconv import-nnunet` with these options. Returns: the exit code."""
    start_logging()
    import_model(options.folder, options.output, options.folds, options.checkpoint)
    return DONE


def import_model(
    folder: Path,
    output: Path,
    folds: Sequence[str] | None = None,
    checkpoint: str = "checkpoint_final.pth",
) -> list[Path]:
    """Write OUTPUT/foldN for each fold, a run folder with the network, its preprocessing and its windows.

    Args: folder: of a trained configuration, with plans.json, dataset.json and fold_N/CHECKPOINT. folds: such
        as 0 or all; None: those that are there.
    Returns: the checkpoints. Raises: ValueError: something is missing, damaged or not supported; nothing of
        that fold is written.
    """
    found = sorted(path.parent.name.removeprefix("fold_") for path in folder.glob(f"fold_*/{checkpoint}"))
    wanted = list(folds or found or ["N"])
    if missing := [fold for fold in wanted if fold not in found]:
        raise ValueError(
            f"{folder}: expected a trained nnU-Net v2 configuration with "
            f"{', '.join(f'fold_{fold}/{checkpoint}' for fold in missing)}"
        )
    return [_import_fold(folder, output / f"fold{fold}", fold, checkpoint) for fold in wanted]


def _import_fold(folder: Path, output: Path, fold: str, checkpoint: str) -> Path:
    if output.exists():
        raise ValueError(f"{output}: exists already; choose another --output")
    source, best = folder / f"fold_{fold}" / checkpoint, RunDir(output).best
    content = checkpoint_io.unpickled(source, inert=True)
    with explained(f"{source}: not a checkpoint of nnU-Net v2", *DAMAGED):
        name, trainer = str(content["init_args"]["configuration"]), str(content["trainer_name"])
        mirror_axes = [int(axis) for axis in content.get("inference_allowed_mirroring_axes") or ()]
        state = dict(content["network_weights"])
    model = nnunet_plans.read(folder, name)
    settings = model.settings(mirror_axes)
    settings["data"]["fold"] = int(fold) if fold.isdigit() else fold
    config, prepared = _resolved(model, settings, output)
    network = build_network(config.model, config.conv, config.derived)
    with explained(f"{source}: its weights do not fit its plans", ValueError, RuntimeError, *DAMAGED):
        weights, unknown = unet_weights(state, model.axes)
        found = network.load_state_dict(weights, strict=False)
        if wrong := [*unknown, *found.missing_keys, *found.unexpected_keys]:
            raise ValueError(f"{some(wrong, 3)} (our names) is in one alone; a trainer of another network?")
    best.parent.mkdir(parents=True)
    values = {f"network.{key}": value for key, value in network.state_dict().items()}
    with replacing(best) as partial:
        torch.save({"state_dict": values, "medconv": record_of(config, prepared)}, partial)
    write_text(output / "config.yaml", _yaml(config.plain()))
    (output / "experiment").mkdir()
    defaults = ["nnunet", {"override /data": "nnunet"}, {"override /model": _option(model)}, "_self_"]
    further = {"defaults": defaults, **settings, "init": {"pretrained": str(best.resolve())}}
    write_text(output / "experiment/finetune.yaml", f"# @package _global_\n{_yaml(further)}")
    RunDir(output).write_summary(status="done", targets=prepared.targets.plain())
    log.info("%s: %s of %s by %s", best, name, prepared.dataset.name, trainer)
    return best


def _option(model: NnUNetModel) -> str:
    """Of `model`, with all keys of the network."""
    return "resenc" if model.network.residual else "customconv"


def _resolved(model: NnUNetModel, settings: Node, output: Path) -> tuple[RunConfig, PreparedData]:
    """The config of a run that had trained this network, and what is known of its data."""
    with initialize_config_dir(str(configs.conf_dir()), version_base="1.3"):
        composed = compose("train", ["experiment=nnunet", "data=nnunet", f"model={_option(model)}"])
    composed.merge_with(settings)
    config = configs.validate(composed)
    network, dims = model.network, len(model.axes)
    planned = Plan(
        spatial_dims=dims,
        slice_axis=model.slice_axis,
        spacing_mm=model.ours(model.spacing_mm),
        patch_size=model.ours(model.patch_size),
        batch_size=model.batch_size,
        strides=tuple(map(model.ours, network.strides[1:])),
        kernel_sizes=tuple(map(model.ours, network.kernel_sizes)),
        channels=network.channels,
        normalisation=model.normalisation,
        memory_gb=Budget().memory_gb,
        size=Budget().size,
    )
    preprocessing = PreprocessingConfig(
        dims,
        planned.spacing_mm,
        model.normalisation,
        model.intensities,
        model.slice_axis,
        convention=model.convention,
    )
    prepared = PreparedData(
        model.dataset,
        [],
        [],
        preprocessing,
        planned,
        Store(output),
        model.dataset.targets,
        spacing_range_mm=model.spacing_range_mm[:dims]
        if model.slice_axis is None
        else model.spacing_range_mm,
    )
    cases = f"{model.num_cases} cases of nnU-Net"
    derived = replace(prepared.derived(), num_train_cases=model.num_cases, train_cases=cases)
    resolved = configs.resolve(config, derived)
    return replace(resolved, trainer=replace(resolved.trainer, precision="32-true")), prepared


def _yaml(values: Node) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(values))
