"""The schema of what the framework itself reads, where `conf/` is, and how a config becomes objects.

Groups whose content belongs to somebody else (`model`, `conv`, `loss`, `optimizer`, `scheduler`, `averaging`,
`stopping`, `augment`, `task`, `logger`, `callbacks`) are free; everything else is typed here, so that a typo
or a wrong type fails before any work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from medconv.config.instantiate import ConfigError, _importable, targets

PACKAGE = Path(__file__).parents[1]


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
    """What the plan may take, and what of it the user says; null is planned."""

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
    """Null, where a value may be null, is for `perf=autotune` to measure."""

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


def keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested config."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield f"{prefix}{name}"
            yield from keys(child, f"{prefix}{name}.")


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, of the leaves of nested values."""
    if isinstance(node, dict) and node:
        return {k: v for name, child in node.items() for k, v in flat(child, f"{prefix}{name}.").items()}
    return {prefix[:-1]: node}


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def checked(config: DictConfig) -> DictConfig:
    """The same config with every value in the type it must have.

    Raises: omegaconf.errors.OmegaConfBaseException: an unknown key or a wrong type, with its full key;
        ConfigError: a `_target_` that cannot be imported.
    """
    typed = OmegaConf.merge(OmegaConf.structured(Config), config)
    assert isinstance(typed, DictConfig)
    for group in (
        "task",
        "model",
        "conv",
        "loss",
        "optimizer",
        "scheduler",
        "weight_averaging",
        "early_stopping",
        "augmentation",
    ):
        for key, target in targets(OmegaConf.to_container(typed[group], resolve=False), group):
            _importable(key, target)
    return typed


def resolved(config: DictConfig, derived: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values, every interpolation replaced; `derived` are what preparation and planning found."""
    config = config.copy()
    OmegaConf.update(config, "derived", dict(derived), merge=False, force_add=True)
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def seconds(duration: str, key: str) -> float:
    """`DD:HH:MM:SS`, as Lightning writes durations, in seconds. Raises: ConfigError: another form."""
    if not re.fullmatch(r"\d+:\d{1,2}:\d{1,2}:\d{1,2}", duration):
        raise ConfigError(
            f"{key} must be written DD:HH:MM:SS, such as 00:00:20:00 for 20 minutes, got {duration!r}"
        )
    days, hours, minutes, rest = (int(part) for part in duration.split(":"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
