"""The typed config of a run: frozen dataclasses, one for each group, which also are OmegaConf's schema.

The keys of `model`, `conv`, `loss`, `optimizer`, `scheduler`, `weight_averaging`, `early_stopping`,
`sampler`, `augmentation`, `logger` and `callbacks` depend on the chosen class and are not typed here. Every
other key is, so that a typo or a wrong type fails before any work. Those of `trainer` are the arguments of
Lightning's `Trainer`, whatever its version.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from medconv.config.values import duration_seconds

PACKAGE = Path(__file__).parents[1]
Node = dict[str, Any]  # a `_target_` and its arguments, or several by name; for `build` alone


@dataclass(frozen=True)
class DataConfig:
    layout: Node = MISSING
    root: str | None = None
    images: Any = None
    labels: str | None = None
    class_names: list[str] | None = None
    modality: str = "MRI"
    fold: Any = 0
    num_folds: int = 5
    group_pattern: str | None = None
    splits_file: str | None = None
    cache_dir: str = MISSING
    spacing_mm: list[float] | None = None
    source_spacing_mm: Any = None
    patch_size: list[int] | None = None
    normalisation: Any = None
    intensities: Any = None
    convention: str | None = None
    spatial_dims: int | None = None
    slice_axis: int | None = None
    flip_label_pairs: Any = None
    regions: Node | None = None
    regions_order: list[int] | None = None
    ignore_label: Any = None
    annotated: Any = None
    case_weights: Any = None
    entries: Any = None
    path_column: str = "path"
    label_columns: Any = None
    split_column: str | None = None
    group_column: str | None = None
    target_type: str | None = None
    resize: list[int] | None = None
    balanced_sampling: bool = False
    batch_size: int | None = None
    samples_per_epoch: int = MISSING
    oversample_foreground: float = 0.33
    num_workers: int | None = None
    prefetch_factor: int = 2
    persistent_workers: bool | None = None
    prepare_workers: int | None = None
    on_invalid_case: str = "raise"


@dataclass(frozen=True)
class TaskConfig:
    deep_supervision: bool = False
    overlap: float = 0.5
    sw_batch_size: int = 4
    mirror_axes: Any = field(default_factory=list)
    mixup: float = 0.0


@dataclass(frozen=True)
class PlanConfig:
    """Limits of the plan, and the parts of it that the user sets; null is planned."""

    size: str | None = None
    memory_gb: float | None = None
    max_batch_size: int | None = None
    max_stages: int | None = None
    strides: Any = None
    kernel_sizes: Any = None
    channels: list[int] | None = None


@dataclass(frozen=True)
class ScheduleConfig:
    """What changes with the progress of a run, beside the learning rate."""

    patch: str | None = None


@dataclass(frozen=True)
class TrainerConfig:
    """The keys of Lightning's Trainer that medconv reads itself; `run_config.trainer_schema` adds the others.

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

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds. Raises: ConfigError: as `duration_seconds`."""
        if self.max_time is None:
            return None
        return duration_seconds(self.max_time, "trainer.max_time")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class RunSettings:
    name: str | None = None
    dir: str | None = None
    resume: str = "auto"
    dry_run: bool = False
    checkpoint_interval: str = "00:00:10:00"
    nan_policy: str = "stop"
    max_skipped_steps: int = 10


@dataclass(frozen=True)
class InitConfig:
    pretrained: str | None = None
    inflate_2d: str | None = None
    freeze: Any = None
    lr_multipliers: dict[str, float] | None = None


@dataclass(frozen=True)
class Derived:
    """What follows from the data, its plan and the task; nodes use it, such as `${derived.num_channels}`.

    Missing until `resolve` fills it in. Axes are those of `spatial_dims`: right, anterior, superior, without
    the slice axis.
    Args:
        targets: as plain values. per_voxel: whether they are label maps.
        class_counts: training cases of each class or label, or above each grade; None: does not apply.
        overlapping: whether outputs may be positive at once, so that each has a sigmoid. exclusive: the
            opposite; a softmax.
        flip_label_pairs: classes that a mirror exchanges, as numbers.
        train_cases: their number and a hash of their names.
        slice_axis: across the slices that a 2D network takes from volumes.
        memory_gb, size: that the run was planned for.
        stem: as `monai_networks.stem_for`.
    """

    num_channels: int = MISSING
    num_classes: int = MISSING
    targets: Node = MISSING
    per_voxel: bool = MISSING
    class_counts: list[int] | None = MISSING
    overlapping: bool = MISSING
    exclusive: bool = MISSING
    class_names: list[str] = MISSING
    flip_label_pairs: list[list[int]] | None = MISSING
    train_cases: str = MISSING
    spatial_dims: int = MISSING
    slice_axis: int | None = MISSING
    spacing_mm: list[float] = MISSING
    patch_size: list[int] = MISSING
    strides: list[list[int]] = MISSING
    kernel_sizes: list[list[int]] = MISSING
    channels: list[int] = MISSING
    normalisation: list[str] = MISSING
    memory_gb: float = MISSING
    size: str = "large"  # of runs before there were sizes
    stage_strides: list[list[int]] = MISSING
    monitor: str = MISSING
    monitor_mode: str = MISSING
    num_train_cases: int = MISSING
    stem: Node = MISSING


@dataclass(frozen=True)
class RunConfig:
    """The whole config of a run."""

    seed: int = 0
    tags: list[str] = field(default_factory=list)
    test: bool = False
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sampler: Node = field(default_factory=dict)
    augmentation: Node = MISSING
    model: Node = MISSING
    conv: Node = MISSING
    init: InitConfig = field(default_factory=InitConfig)
    loss: Node = MISSING
    optimizer: Node = MISSING
    scheduler: Node = MISSING
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    weight_averaging: Node = field(default_factory=dict)
    early_stopping: Node = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    perf: PerfConfig = field(default_factory=PerfConfig)
    logger: Node = field(default_factory=dict)
    callbacks: Node = field(default_factory=dict)
    run: RunSettings = field(default_factory=RunSettings)
    derived: Derived = field(default_factory=Derived)

    def plain(self) -> Node:
        """Nested dicts and lists, as in a run's `config.yaml` and in checkpoints."""
        return asdict(self)


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"
