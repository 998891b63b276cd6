"""The typed schema of the config, its validation, and where `conf/` is.

The keys of `model`, `conv`, `loss`, `optimizer`, `scheduler`, `weight_averaging`, `early_stopping`,
`augmentation`, `logger` and `callbacks` depend on the chosen class and are not typed here. Every
other key is, so that a typo or a wrong type fails before any work. Those of `trainer` are the arguments of
Lightning's `Trainer`, whatever its version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, get_args

from omegaconf import MISSING, DictConfig, OmegaConf

from medconv.config.instantiate import check_importable, iter_targets
from medconv.config.values import ConfigError, Values

PACKAGE = Path(__file__).parents[1]
_GROUPS_OF_CLASSES = (
    *("model", "conv", "loss", "optimizer", "scheduler"),
    *("weight_averaging", "early_stopping", "augmentation", "trainer"),
)
# Arguments of Lightning's Trainer that are set elsewhere, and where.
_ELSEWHERE = {
    "callbacks": "add callbacks by +callbacks.NAME._target_=CLASS",
    "logger": "choose loggers by logger=NAME, or add one by +logger.NAME._target_=CLASS",
    "default_root_dir": "run.dir is the run's folder",
    "enable_checkpointing": "every run writes checkpoints; run.checkpoint_interval says how often",
    "use_distributed_sampler": "medconv divides the cases over the devices itself",
}


@dataclass
class DataConfig:
    layout: dict[str, Any] = MISSING
    root: str | None = None
    images: str | None = None
    labels: str | None = None
    class_names: list[str] | None = None
    modality: str = "MRI"
    fold: Any = 0
    num_folds: int = 5
    splits_file: str | None = None
    cache_dir: str = MISSING
    spacing_mm: list[float] | None = None
    patch_size: list[int] | None = None
    normalisation: Any = None
    spatial_dims: int | None = None
    flip_label_pairs: Any = None
    regions: dict[str, Any] | None = None
    regions_order: list[int] | None = None
    ignore_label: Any = None
    path_column: str = "path"
    label_columns: Any = None
    split_column: str | None = None
    group_column: str | None = None
    target_type: str | None = None
    resize: list[int] | None = None
    balanced_sampling: bool = False
    batch_size: int | None = None
    samples_per_epoch: int = MISSING
    oversample_foreground: float = MISSING
    num_workers: int | None = None
    prefetch_factor: int = 2
    persistent_workers: bool | None = None
    prepare_workers: int | None = None
    on_invalid_case: str = "raise"


@dataclass
class TaskConfig:
    deep_supervision: bool = False
    overlap: float = 0.5
    sw_batch_size: int = 4
    mirror_axes: Any = field(default_factory=list)
    mixup: float = 0.0


@dataclass
class PlanConfig:
    """Limits of the plan, and the parts of it that the user sets; null is planned."""

    memory_gb: float | None = None
    max_batch_size: int | None = None
    max_stages: int | None = None
    strides: Any = None
    kernel_sizes: Any = None
    channels: list[int] | None = None


@dataclass
class TrainerConfig:
    """The keys of Lightning's Trainer that medconv reads or types itself; `trainer_schema` adds the others.

    `max_time` also bounds validation and fits the schedule.
    """

    accelerator: str = "auto"
    devices: Any = None
    num_nodes: int | None = None
    strategy: Any = "auto"
    precision: Any = "auto"
    max_time: str | None = None
    max_epochs: int | None = None
    max_steps: int = -1
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    benchmark: bool | None = None
    deterministic: Any = None
    sync_batchnorm: bool = False
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    enable_progress_bar: bool = True
    model_registry: str | None = None
    plugins: Any = None


@dataclass
class PerfConfig:
    """`perf=autotune` measures the values that are null."""

    channels_last: bool | None = True
    fast_norm: bool | None = True
    fast_depthwise: bool = True
    activation_checkpointing: str | None = "none"
    compile: bool | None = False
    cuda_graphs: bool = False
    fused_optimizer: bool = True
    matmul_precision: str = "high"
    stop_sync_interval: int = 20
    timeout_seconds: float = 1800.0
    profile: bool = False
    auto_seconds: float = 30.0
    auto_batch_size: bool = False


@dataclass
class RunConfig:
    name: str | None = None
    dir: str | None = None
    resume: str = "auto"
    dry_run: bool = False
    checkpoint_interval: str = "00:00:10:00"
    nan_policy: str = "stop"
    max_skipped_steps: int = 10


@dataclass
class InitConfig:
    pretrained: str | None = None
    inflate_2d: str | None = None
    freeze: Any = None
    lr_multipliers: dict[str, float] | None = None


@dataclass
class Config:
    seed: int = 0
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    augmentation: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    conv: dict[str, Any] = MISSING
    init: InitConfig = field(default_factory=InitConfig)
    loss: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    scheduler: dict[str, Any] = MISSING
    weight_averaging: dict[str, Any] = field(default_factory=dict)
    early_stopping: dict[str, Any] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    perf: PerfConfig = field(default_factory=PerfConfig)
    logger: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    run: RunConfig = field(default_factory=RunConfig)
    derived: dict[str, Any] = field(default_factory=dict)


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


@cache
def trainer_schema(trainer: Callable[..., Any]) -> type[TrainerConfig]:
    """`TrainerConfig` with all other arguments of Lightning's Trainer, with its types and defaults."""
    ours = {entry.name for entry in fields(TrainerConfig)}
    theirs = [
        (name, _type_of(argument.annotation), field(default=argument.default))
        for name, argument in signature(trainer).parameters.items()
        if argument.default is not argument.empty and name not in {*ours, *_ELSEWHERE}
    ]
    return make_dataclass("TrainerConfig", theirs, bases=(TrainerConfig,))


def _type_of(annotation: Any) -> Any:
    """The annotation if OmegaConf can check it, else Any."""
    parts = get_args(annotation) or (annotation,)
    return annotation if set(parts) <= {bool, int, float, str, type(None)} else Any


def place_elsewhere(key: str) -> str | None:
    """For an argument of Lightning's Trainer that is not set by its key, an error that says what sets it."""
    place = _ELSEWHERE.get(key.removeprefix("trainer."))
    return f"{key} cannot be set: {place}" if place and key.startswith("trainer.") else None


def validate(config: DictConfig) -> DictConfig:
    """The same config, with every value converted to its type in the schema.

    Raises: omegaconf.errors.OmegaConfBaseException: an unknown key or a wrong type, with its full key;
        ConfigError: a `_target_` that cannot be imported, or a key of `trainer` that is set elsewhere.
    """
    from lightning import Trainer  # loads torch, which printing a config does not need

    for key in config.trainer:
        if error := place_elsewhere(f"trainer.{key}"):
            raise ConfigError(error)
    schema = OmegaConf.structured(Config(trainer=trainer_schema(Trainer)()))
    typed = OmegaConf.merge(schema, config)
    assert isinstance(typed, DictConfig)
    for group in _GROUPS_OF_CLASSES:
        for key, target in iter_targets(OmegaConf.to_container(typed[group], resolve=False), group):
            check_importable(key, target)
    return typed


def resolve(config: DictConfig, derived: Mapping[str, Any]) -> Values:
    """Plain values with every interpolation replaced.

    Args: derived: results of preprocessing and planning.
    """
    config = config.copy()
    OmegaConf.update(config, "derived", dict(derived), merge=False, force_add=True)
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]
