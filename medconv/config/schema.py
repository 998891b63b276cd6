"""The typed config of a run: frozen dataclasses, one for each group, which also are OmegaConf's schema.

Each key is declared once, with its type, the values that it takes and one line of text (`keys.key`): here,
in `data_config.py` or in `trainer_config.py`.

The keys of `model`, `conv`, `loss`, `optimizer`, `scheduler`, `weight_averaging`, `early_stopping`,
`sampler`, `augmentation`, `logger` and `callbacks` depend on the chosen class and are not typed here. Every
other key is, so that a typo or a wrong type fails before any work. Those of `trainer` are the arguments of
Lightning's `Trainer`, whatever its version.
"""

from dataclasses import asdict, dataclass, field
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from medconv.config.data_config import DataConfig
from medconv.config.keys import Node, key
from medconv.config.trainer_config import TrainerConfig
from medconv.utils.precisions import MATMUL_PRECISIONS

PACKAGE = Path(__file__).parents[1]
# Groups of the config that are one class and its arguments
GROUPS_WITH_CLASS = (
    "model",
    "conv",
    "loss",
    "optimizer",
    "scheduler",
    "weight_averaging",
    "early_stopping",
    "sampler",
    "augmentation",
)

# Keys that may be null: a run then measures which value is fastest, as `perf=autotune` asks
TUNED = (
    "perf.channels_last",
    "perf.fast_norm",
    "perf.activation_checkpointing",
    "perf.compile",
    "trainer.precision",
)


@dataclass(frozen=True)
class TaskConfig:
    deep_supervision: bool = key(False, "also train heads on the coarser stages of our U-Net")
    overlap: float = key(0.5, "of neighbouring windows over a volume, as a share of the window", ge=0, lt=1)
    sw_batch_size: int = key(4, "windows in one forward pass", ge=1)
    mirror_axes: Any = key(
        [],
        "spatial axes of mirror test-time augmentation, or `all`",
        accepts=list[int] | Literal["all"],
        ge=0,
    )
    mixup: float = key(
        0.0,
        "for image-level targets: alpha of Beta(alpha, alpha), the weights of two mixed samples",
        ge=0,
        lt=inf,
    )


@dataclass(frozen=True)
class PlanConfig:
    """Limits of the plan, and the parts of it that the user sets; null is planned."""

    size: str | None = key(
        None,
        "of network, patch and batch; null: full (on a CPU large), or what fits into trainer.max_time",
        choices=("full", "large", "medium", "small", "tiny"),
    )
    memory_gb: float | None = key(
        None, "device memory for a training step, in GB; null: measured", gt=0, lt=inf
    )
    max_batch_size: int | None = key(None, "null: 4, in 2D 12, since short runs need many steps", ge=1)
    max_stages: int | None = key(None, "null: as many as the patch can be halved for", ge=1)
    strides: Any = key(
        None, "between stages, per axis; null plans them", accepts=list[int | list[int]] | None, ge=1
    )
    kernel_sizes: Any = key(
        None, "per stage, per axis; null plans them", accepts=list[int | list[int]] | None, ge=1
    )
    channels: list[int] | None = key(None, "per stage, finest first; null plans them", ge=1)


@dataclass(frozen=True)
class ScheduleConfig:
    """What changes with the progress of a run, beside the learning rate."""

    patch: str | None = key(
        None,
        "progressive: the patch grows during the run; null: progressive where that is possible",
        choices=("progressive", "whole"),
    )


@dataclass(frozen=True)
class PerfConfig:
    """`perf=autotune` measures the values that are null."""

    # memory format and kernels
    channels_last: bool | None = key(True, "channels-last memory format; null: perf=autotune measures it")
    fast_norm: bool | None = key(
        True, "norms in channels-last, fused with the activation that follows; batch norms on a GPU only"
    )
    fast_depthwise: bool = key(True, "depthwise 3D convolutions in bf16 on a CPU, in blocks of 16 channels")
    activation_checkpointing: str | None = key(
        "none",
        "recompute in the backward pass: norms and activations (pointwise), or whole blocks",
        choices=("none", "blocks", "pointwise"),
    )
    compile: bool | None = key(False, "torch.compile; pays off in runs of half an hour and more")
    cuda_graphs: bool = key(False, "with compile, on a GPU: launch all kernels of a step at once")
    fused_optimizer: bool = key(True, "one kernel for all parameters, if the optimizer has one")
    matmul_precision: str = key("high", "of fp32 on GPUs; high is TF32", choices=MATMUL_PRECISIONS)
    # several processes
    stop_sync_interval: int = key(20, "batches between which the processes of a run share stop signals", ge=1)
    timeout_seconds: float = key(
        1800.0, "how long to wait for another process of the run before it counts as lost", gt=0, lt=inf
    )
    # measurements
    profile: bool = key(False, "true writes a torch.profiler trace of a few steps")
    auto_seconds: float = key(30.0, "how long perf=autotune measures", gt=0)
    auto_batch_size: bool = key(False, "perf=autotune: may also double data.batch_size repeatedly")


@dataclass(frozen=True)
class RunSettings:
    name: str | None = key(
        None, "the run's folder is runs/NAME; null: from the main choices and a hash of the config"
    )
    dir: str | None = key(None, "another folder instead")
    packages: list[str] = key([], "packages of your own to import; the same as --package NAME")
    resume: str = key("auto", "auto resumes a stopped run; never starts a new one; or a checkpoint")
    dry_run: bool = key(False, "true: print what would be run, without running it")
    checkpoint_interval: str = key("00:00:10:00", "DD:HH:MM:SS between checkpoints", duration=True)
    nan_policy: str = key(
        "stop",
        "if a loss or gradient is not finite: stop the run, or skip the step",
        choices=("stop", "skip"),
    )
    max_skipped_steps: int = key(10, "with nan_policy=skip; one more stops the run", ge=1)


@dataclass(frozen=True)
class InitConfig:
    pretrained: str | None = key(
        None, "a checkpoint, state dict or folder of a trained nnU-Net; tensors that fit are loaded"
    )
    inflate_2d: str | None = key(
        None,
        "2D weights in a 3D network: repeated along the new axis, or distributed over planes (acs)",
        choices=("inflate", "acs"),
    )
    freeze: Any = key(
        None, "regular expressions on the names of parameters that are not trained", accepts=list[str] | None
    )
    thaw_at: float | None = key(
        None, "share of the run after which the parameters of init.freeze train too; null: never", gt=0, lt=1
    )
    lr_multipliers: dict[str, float] | None = key(
        None, "learning rate factors by regular expression", gt=0, lt=inf
    )


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
    size: str = "full"  # of runs before there were sizes
    stage_strides: list[list[int]] = MISSING
    monitor: str = MISSING
    monitor_mode: str = MISSING
    num_train_cases: int = MISSING
    stem: Node = MISSING


@dataclass(frozen=True)
class RunConfig:
    """The whole config of a run."""

    seed: int = key(0, "of initial weights, patches and augmentation", ge=0)
    tags: list[str] = key([], "words that find a run again, in config.yaml, wandb and mlflow")
    test: bool = key(False, "true: score the test cases with the best checkpoint after training")
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sampler: Node = key({}, "what training samples are drawn from")
    augmentation: Node = key(MISSING, "the transforms of training samples")
    model: Node = key(MISSING, "the network")
    conv: Node = key(MISSING, "the convolution of the network's layers")
    init: InitConfig = field(default_factory=InitConfig)
    loss: Node = key(MISSING, "the loss")
    optimizer: Node = key(MISSING, "the optimizer")
    scheduler: Node = key(MISSING, "the learning rate schedule")
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    weight_averaging: Node = key({}, "the average of weights that is validated and kept")
    early_stopping: Node = key({}, "when to stop before the end")
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    perf: PerfConfig = field(default_factory=PerfConfig)
    logger: Node = key({}, "loggers of Lightning, by name")
    callbacks: Node = key({}, "further callbacks of Lightning, by name")
    run: RunSettings = field(default_factory=RunSettings)
    derived: Derived = field(default_factory=Derived)

    def plain(self) -> Node:
        """Nested dicts and lists, as in a run's `config.yaml` and in checkpoints."""
        values = asdict(self)
        if not self.run.packages:  # only runs that have some say so
            del values["run"]["packages"]
        return values


def open_keys(config: RunConfig) -> list[str]:
    """The keys whose values a run is to measure before it trains."""
    nulls = [key for key in TUNED if attrgetter(key)(config) is None]
    return [*nulls, "perf.auto_batch_size"] if config.perf.auto_batch_size else nulls


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"
