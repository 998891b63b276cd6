"""A trained nnU-Net v2 model becomes a run folder for each of its folds."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from torch import nn

from medconv import config as configs
from medconv.config import Node, RunConfig
from medconv.config.values import to_yaml
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.data.preprocessing.store import Store
from medconv.features.nnunet import plans
from medconv.features.nnunet.plans import DAMAGED, NnUNetModel, TrainedFold, read_checkpoint
from medconv.features.pretrained.nnunet_names import unet_weights
from medconv.models.build import build_network
from medconv.planning.planner import Plan
from medconv.planning.topology import Budget
from medconv.training.build import record_of
from medconv.training.data_setup import PreparedData
from medconv.training.plan_setup import derived_values
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import replacing, write_text
from medconv.utils.errors import explained
from medconv.utils.logging import some

log = logging.getLogger(__name__)


def import_model(
    folder: Path, output: Path, folds: Sequence[str] | None = None, checkpoint: str = "checkpoint_final.pth"
) -> list[Path]:
    """Write OUTPUT/foldN for each fold, a run folder with the network, its preprocessing and its windows.

    Args:
        folder: of a trained configuration, with plans.json, dataset.json and fold_N/CHECKPOINT.
        output: folder of the run folders.
        folds: such as 0 or all; None: those that are there.
        checkpoint: file name.
    Returns:
        The checkpoints of the run folders.
    Raises:
        ValueError: something is missing, damaged or not supported; nothing of that fold is written.
    """
    checkpoints = folder.glob(f"fold_*/{checkpoint}")
    trained_folds = sorted(path.parent.name.removeprefix("fold_") for path in checkpoints)
    requested = list(folds or trained_folds or ["N"])
    missing = [f"fold_{fold}/{checkpoint}" for fold in requested if fold not in trained_folds]
    if missing:
        raise ValueError(f"{folder}: expected a trained nnU-Net v2 configuration with {', '.join(missing)}")
    return [_import_fold(folder, output / f"fold{fold}", fold, checkpoint) for fold in requested]


def _import_fold(folder: Path, output: Path, fold: str, checkpoint: str) -> Path:
    if output.exists():
        raise ValueError(f"{output}: exists already; choose another output")
    trained = read_checkpoint(folder / f"fold_{fold}" / checkpoint)
    model = plans.read(folder, trained.configuration)
    settings = model.settings(trained.mirror_axes)
    settings["data"]["fold"] = int(fold) if fold.isdigit() else fold
    config, prepared = _resolved(model, settings, output)
    network = build_network(config.model, config.conv, config.derived)
    _load_weights(network, trained, model)

    run = RunDir(output)
    run.best.parent.mkdir(parents=True)
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    with replacing(run.best) as partial, partial.open("wb") as opened:
        checkpoint_io.save({"state_dict": state, "medconv": record_of(config, prepared)}, opened)
    write_text(output / "config.yaml", to_yaml(config.plain()))
    _write_experiment(output / "experiment", model, settings, pretrained=run.best)
    run.write_summary(status="done", targets=prepared.targets.plain())
    log.info(
        "%s: %s of %s by %s", run.best, trained.configuration, prepared.dataset.name, trained.trainer_name
    )
    return run.best


def _load_weights(network: nn.Module, trained: TrainedFold, model: NnUNetModel) -> None:
    """Raises: ValueError: the weights are those of another network."""
    with explained(f"{trained.path}: its weights do not fit its plans", ValueError, RuntimeError, *DAMAGED):
        weights, unknown = unet_weights(trained.weights, model.axes)
        loaded = network.load_state_dict(weights, strict=False)
        unmatched = [*unknown, *loaded.missing_keys, *loaded.unexpected_keys]
        if unmatched:
            raise ValueError(
                f"{some(unmatched, 3)} (our names): in plans or weights only; was another network trained?"
            )


def _write_experiment(folder: Path, model: NnUNetModel, settings: Node, pretrained: Path) -> None:
    """`finetune.yaml`: continues with these weights on further data, by `experiment=finetune`."""
    folder.mkdir()
    defaults = ["nnunet", {"override /data": "nnunet"}, {"override /model": _option(model)}, "_self_"]
    content = {"defaults": defaults, **settings, "init": {"pretrained": str(pretrained.resolve())}}
    write_text(folder / "finetune.yaml", f"# @package _global_\n{to_yaml(content)}")


def _option(model: NnUNetModel) -> str:
    """Of `model`, with all keys of the network."""
    return "resenc" if model.network.residual else "customconv"


def _resolved(model: NnUNetModel, settings: Node, output: Path) -> tuple[RunConfig, PreparedData]:
    """The config of a run that had trained this network, and what is known of its data."""
    with initialize_config_dir(str(configs.conf_dir()), version_base="1.3"):
        composed = compose("train", ["experiment=nnunet", "data=nnunet", f"model={_option(model)}"])
    composed.merge_with(settings)
    config = configs.validate(composed)
    prepared = _prepared(model, output)
    derived = replace(
        prepared.derived, num_train_cases=model.num_cases, train_cases=f"{model.num_cases} cases of nnU-Net"
    )
    resolved = configs.with_derived(config, derived)
    return replace(resolved, trainer=replace(resolved.trainer, precision="32-true")), prepared


def _prepared(model: NnUNetModel, output: Path) -> PreparedData:
    """The data as if medconv had prepared it, without its cases."""
    dims = len(model.axes)
    plan = _plan(model)
    preprocessing = PreprocessingConfig(
        dims,
        plan.spacing_mm,
        model.normalisation,
        model.intensities,
        model.slice_axis,
        convention=model.convention,
    )
    # For slices of volumes, a 2D network knows the spacing along all three axes
    takes_slices = model.slice_axis is not None
    spacing_range_mm = model.spacing_range_mm if takes_slices else model.spacing_range_mm[:dims]
    targets = model.dataset.targets
    return PreparedData(
        dataset=model.dataset,
        train=[],
        val=[],
        preprocessing=preprocessing,
        plan=plan,
        store=Store(output),
        targets=targets,
        derived=derived_values(plan, model.dataset, [], targets),
        spacing_range_mm=spacing_range_mm,
    )


def _plan(model: NnUNetModel) -> Plan:
    network = model.network
    return Plan(
        spatial_dims=len(model.axes),
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
