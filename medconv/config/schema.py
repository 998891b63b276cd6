"""The typed schema of the config, its validation, and where `conf/` is.

The keys of `model`, `conv`, `loss`, `optimizer`, `scheduler`, `weight_averaging`, `early_stopping`,
`augmentation`, `task`, `logger` and `callbacks` depend on the chosen class and are not typed here. Every
other key is, so that a typo or a wrong type fails before any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from medconv.config.instantiate import check_importable, iter_targets
from medconv.config.values import Values

PACKAGE = Path(__file__).parents[1]
_GROUPS_OF_CLASSES = (
    *("task", "model", "conv", "loss", "optimizer", "scheduler"),
    *("weight_averaging", "early_stopping", "augmentation"),
)


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
    """Lightning's own keys and meanings; `max_time` also bounds validation and fits the schedule."""

    accelerator: str = "auto"
    devices: Any = None
    num_nodes: int | None = None
    strategy: Any = "auto"
    precision: Any = "auto"
    max_time: str | None = None
    max_epochs: int | None = None
    max_steps: int = -1
    min_epochs: int | None = None
    min_steps: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    benchmark: bool | None = None
    deterministic: Any = None
    sync_batchnorm: bool = False
    check_val_every_n_epoch: int | None = 1
    val_check_interval: Any = None
    num_sanity_val_steps: int | None = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    overfit_batches: Any = 0.0
    log_every_n_steps: int = 10
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    detect_anomaly: bool = False
    profiler: Any = None
    fast_dev_run: Any = False
    inference_mode: bool = True
    barebones: bool = False


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
    task: dict[str, Any] = MISSING
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


def validate(config: DictConfig) -> DictConfig:
    """The same config, with every value converted to its type in the schema.

    Raises: omegaconf.errors.OmegaConfBaseException: an unknown key or a wrong type, with its full key;
        ConfigError: a `_target_` that cannot be imported.
    """
    typed = OmegaConf.merge(OmegaConf.structured(Config), config)
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
