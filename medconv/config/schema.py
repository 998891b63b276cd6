"""The typed config of a run: frozen dataclasses, one for each group, which also are OmegaConf's schema.

Each key is declared once, with its type, the values that it takes and one line of text (`keys.key`).

The keys of `model`, `conv`, `loss`, `optimizer`, `scheduler`, `weight_averaging`, `early_stopping`,
`sampler`, `augmentation`, `logger` and `callbacks` depend on the chosen class and are not typed here. Every
other key is, so that a typo or a wrong type fails before any work. Those of `trainer` are the arguments of
Lightning's `Trainer`, whatever its version.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from fnmatch import fnmatchcase
from functools import cache
from inspect import signature
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from medconv.config.keys import Node, key
from medconv.config.values import ConfigError, duration_seconds, is_plain

# of `Trainer(precision=...)`, and medconv's `auto`
PRECISIONS = (
    "auto",
    "bf16-mixed",
    "16-mixed",
    "32-true",
    "64-true",
    "bf16-true",
    "16-true",
    "transformer-engine",
    "transformer-engine-float16",
    "64",
    "32",
    "16",
    "bf16",
)
# of `torch.set_float32_matmul_precision`
MATMUL_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class DataConfig:
    # where the cases are
    layout: Node = key(MISSING, "the class that finds the cases of a dataset, and its arguments")
    root: str | None = key(None, "folder of the dataset; for data=csv the table", path=True)
    images: Any = key(
        None,
        "data=folder: pattern of image files with {id}, or one for each channel",
        accepts=str | dict[str, str] | None,
    )
    labels: str | None = key(None, "data=folder: pattern of label files with {id}")
    class_names: list[str] | None = key(None, "names of the classes, the background first")
    modality: str = key("MRI", "CT has a normalisation of its own")
    # which cases train and which validate
    fold: Any = key(0, "0 ... num_folds - 1, or `all` to train on every case", accepts=int | Literal["all"])
    num_folds: int = key(
        5,
        "number of cross-validation folds, the same as nnU-Net's: sorted ids, shuffled with seed 12345",
        ge=2,
    )
    group_pattern: str | None = key(
        None,
        "regular expression for the patient in a case id, such as '(patient\\d+)'; a patient's cases"
        " stay in one fold",
    )
    splits_file: str | None = key(None, "a splits_final.json to use instead of folds by number")
    # preprocessing; what is null follows from the plan of the data
    cache_dir: str = key(MISSING, "folder of prepared cases", path=True)
    store: str = key(
        "npy",
        "format of prepared cases: blosc2 compresses them, for stores that exceed the memory",
        choices=("npy", "blosc2"),
    )
    spacing_mm: list[float] | None = key(
        None, "grid to resample to, right-anterior-superior; null plans it", gt=0, lt=inf
    )
    source_spacing_mm: Any = key(
        None,
        "spacing of files whose headers have lost it, such as [1.25,1.25,10], or {siteA_*: [...]} by case id",
        accepts=list[float] | dict[str, list[float]] | None,
        gt=0,
        lt=inf,
    )
    patch_size: list[int] | None = key(None, "in voxels of the resampled grid; null plans it", ge=1)
    normalisation: Any = key(
        None,
        "zscore, zscore_nonzero (only voxels that are not 0), ct, dataset, rescale or none, one "
        "name or one per channel; null decides by modality and values, or by what is predicted",
        accepts=str | list[str] | None,
        choices=("zscore", "zscore_nonzero", "ct", "dataset", "rescale", "none"),
    )
    intensities: Any = key(
        None,
        "for ct and dataset, per channel: {mean: 40, std: 90, percentile_00_5: -900, "
        "percentile_99_5: 300}; null measures them",
        accepts=list[dict[str, float]] | None,
    )
    convention: str | None = key(
        None,
        "nnunet: axes as stored, nnU-Net's resampling and windows, for imported networks; "
        "nnunet_ras: axes turned",
        choices=("nnunet", "nnunet_ras"),
    )
    spatial_dims: int | None = key(
        None,
        "dimensions of the network: 2 trains on slices of volumes, across slice_axis; null: those "
        "of the data",
        choices=(2, 3),
    )
    slice_axis: int | None = key(
        None, "axis across the slices of a 2D network: 0, 1 or 2; null: the coarsest axis", choices=(0, 1, 2)
    )
    # what labels mean
    flip_label_pairs: Any = key(
        None,
        "pairs of classes or points that swap when mirroring left and right, such as [[left_kidney,"
        " right_kidney]]",
        accepts=list[Any] | None,
    )
    regions: Node | None = key(
        None,
        "overlapping regions of classes, a sigmoid each, such as {whole: [edema, core], core: "
        "[core]}; null trains the classes",
    )
    regions_order: list[int] | None = key(
        None, "label value that each region writes into a prediction; later ones overwrite earlier ones"
    )
    ignore_label: Any = key(
        None,
        "value or name of unlabelled voxels, above all classes; excluded from loss and metrics",
        accepts=int | str | list[int | str] | None,
    )
    # patterns of case ids are those of a shell, such as siteA_*
    annotated: Any = key(
        None,
        "cases that lack some labels, such as {siteA_*: [liver, spleen]} by case id: other classes "
        "are left out of their loss and scores",
        accepts=dict[str, list[int | str]] | None,
    )
    raters: Any = key(
        None,
        "label files of further raters, such as 'rater2/{id}.nii.gz' (in data.root), or a list; the"
        " network learns the share of the raters that drew a voxel",
        accepts=str | list[str] | None,
    )
    soft_labels: bool | None = key(
        None, "true: label files hold the probability of each class, one channel each"
    )
    missing: str | None = key(
        None,
        "allow: cases may lack channels (files); the network learns to predict without them",
        choices=("allow",),
    )
    channel_dropout: float | None = key(
        None,
        "with missing=allow, the probability with which training drops each channel; null: 0.25",
        ge=0,
        lt=1,
    )
    case_weights: Any = key(
        None,
        "such as {siteA_*: 2}: these cases are drawn twice as often, see `sampler`; null: pictures "
        "of rare kinds are drawn more often, all other cases alike; {}: all alike",
        accepts=dict[str, float] | None,
        gt=0,
        lt=inf,
    )
    entries: Any = key(
        None,
        "data=joined: several datasets by name, each with its layout and keys",
        accepts=dict[str, Any] | None,
    )
    # tables (data=csv) and image-level targets
    path_column: str = key("path", "data=csv: column with the image file")
    label_columns: Any = key(
        None, "data=csv: column with the label, or a list of columns", accepts=str | list[str] | None
    )
    split_column: str | None = key(None, "data=csv: column with train, val or test")
    group_column: str | None = key(None, "data=csv: column with the patient")
    target_type: str | None = key(None, "data=csv: kind of targets; null: by the columns")
    resize: list[int] | None = key(
        None,
        "for image-level targets: voxels to scale each image to, such as [224,224]; null needs "
        "pictures of one size, and resamples volumes to spacing_mm",
        ge=1,
    )
    # sampling and loading
    balanced_sampling: bool = key(
        False,
        "true: sampler=balanced, which draws each class equally often; for label maps, where a "
        "patch is centred on a foreground voxel",
    )
    batch_size: int | None = key(None, "per device; null plans it", ge=1)
    global_batch_size: int | None = key(
        None,
        "samples of a batch over all devices; null: batch_size per device, or as before on other devices",
        ge=1,
    )
    samples_per_epoch: int | None = key(
        None, "over all devices, in whole steps; null: 1000; for whole images 5 per case, 1000 to 5000", ge=1
    )
    oversample_foreground: float = key(
        0.33, "share of patches centred on a foreground voxel; see `sampler`", ge=0, le=1
    )
    num_workers: int | None = key(
        None, "loader processes per device; null: half of the cores, 8 or fewer", ge=0
    )
    prefetch_factor: int = key(2, "batches that each worker keeps ready", ge=1)
    persistent_workers: bool | None = key(None, "keep workers between epochs; null: if there are workers")
    prepare_workers: int | None = key(
        None,
        "cases to check or preprocess in parallel, each about four times its image in memory; null:"
        " one per core, up to 8",
        ge=1,
    )
    on_invalid_case: str = key(
        "raise",
        "raise an error, or skip invalid cases and list them in the log and summary.json",
        choices=("raise", "skip"),
    )


# Arguments of Lightning's Trainer that are set elsewhere, and where.
_ELSEWHERE = {
    "callbacks": "add callbacks by +callbacks.NAME._target_=CLASS",
    "logger": "choose loggers by logger=NAME, or add one by +logger.NAME._target_=CLASS",
    "default_root_dir": "run.dir is the run's folder",
    "enable_checkpointing": "every run writes checkpoints; run.checkpoint_interval says how often",
    "use_distributed_sampler": "medconv divides the cases over the devices itself",
}


@dataclass(frozen=True)
class TrainerConfig:
    """The keys of Lightning's Trainer that medconv reads or checks; `trainer_schema` adds the others.

    `max_time` also bounds validation and fits the schedule.
    """

    # devices and processes
    accelerator: str = key("auto", "cpu, gpu or auto")
    devices: Any = key(
        None,
        "number, list of GPUs or auto; null: as many as torchrun or srun started processes, else 1",
        accepts=int | str | list[int] | None,
    )
    num_nodes: int | None = key(None, "machines; null: as many as torchrun or srun started on", ge=1)
    strategy: Any = key("auto", "ddp or fsdp for several devices")
    # numbers; medconv resolves `auto` before Lightning sees it
    precision: Any = key(
        "auto",
        "auto: bf16-mixed if the hardware is fast at it, else 16-mixed on a GPU, 32-true on a CPU; "
        "null: perf=autotune measures it",
        accepts=str | int | None,
        choices=PRECISIONS,
    )
    # length of the run
    max_time: str | None = key(
        None,
        "DD:HH:MM:SS, validation included, mostly at most 15 %; the learning rate schedule adapts",
        duration=True,
        gt=0,
    )
    max_epochs: int | None = key(None, "epochs; null: 100, unless max_time or max_steps is set", ge=-1)
    max_steps: int = key(-1, "optimizer steps; -1: no limit", ge=-1)
    accumulate_grad_batches: int = key(1, "batches before each optimizer step", ge=1)
    gradient_clip_val: float | None = key(None, "largest norm of the gradient; null does not clip", ge=0)
    gradient_clip_algorithm: str | None = key(
        None, "norm: of all gradients together, the default; value: each one", choices=("norm", "value")
    )
    benchmark: bool | None = key(
        None, "null: cuDNN tries its algorithms on a GPU, unless trainer.deterministic is set"
    )
    deterministic: Any = key(
        None, "true: only deterministic algorithms; slower on GPUs", accepts=bool | Literal["warn"] | None
    )
    sync_batchnorm: bool = key(False, "batch norms over all GPUs")
    # whole numbers are batches, fractions are shares, as in Lightning
    limit_train_batches: Any = key(
        None, "batches of an epoch, or a share of them", accepts=float | None, ge=0, share=True
    )
    limit_val_batches: Any = key(
        None,
        "validation batches of each process, or a share; of one case, or of data.batch_size whole images",
        accepts=float | None,
        ge=0,
        share=True,
    )
    limit_test_batches: Any = key(None, "the same for test cases", accepts=float | None, ge=0, share=True)
    limit_predict_batches: Any = key(None, "not used: medconv predict predicts", accepts=float | None, ge=0)
    overfit_batches: Any = key(
        0.0, "train and validate on the first batches alone, or a share", accepts=float, ge=0, share=True
    )
    # Lightning accepts 0 and then never validates
    check_val_every_n_epoch: int | None = key(1, "epochs between validations", gt=0)
    val_check_interval: Any = key(
        None,
        "batches between validations, a share of an epoch, or a duration",
        accepts=float | str | dict[str, Any] | None,
        gt=0,
        share=True,
    )
    num_sanity_val_steps: int = key(
        2,
        "cases that a new run validates first; the second tells max_time how long one takes; -1: all",
        ge=-1,
    )
    reload_dataloaders_every_n_epochs: int = key(0, "0: never", ge=0)
    enable_progress_bar: bool = key(True, "in a terminal")
    barebones: bool = key(False, "true is refused: it leaves out checkpoints, which every run writes")
    profiler: Any = key(None, "simple, advanced, pytorch, xla, or a node with _target_")
    model_registry: str | None = key(None, "not used: checkpoints are files")
    plugins: Any = key(None, "a list, such as [{_target_: lightning.pytorch.plugins.TorchSyncBatchNorm}]")

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds. Raises: ConfigError: as `duration_seconds`."""
        if self.max_time is None:
            return None
        return duration_seconds(self.max_time, "trainer.max_time")


@cache
def trainer_schema(trainer: Callable[..., Any]) -> type[TrainerConfig]:
    """`TrainerConfig` with all other arguments of Lightning's Trainer, with its types and defaults."""
    declared = {entry.name for entry in fields(TrainerConfig)}
    added = [
        # Any for an annotation that OmegaConf cannot check
        (name, argument.annotation if is_plain(argument.annotation) else Any, field(default=argument.default))
        for name, argument in signature(trainer).parameters.items()
        if argument.default is not argument.empty and name not in {*declared, *_ELSEWHERE}
    ]
    return make_dataclass("TrainerConfig", added, bases=(TrainerConfig,), frozen=True)


def set_elsewhere(key: str) -> str | None:
    """For an argument of Lightning's Trainer that is not set by its key, an error that says what sets it.

    Args: key: a full key, such as `trainer.callbacks`.
    """
    group, _, argument = key.partition(".")
    if group != "trainer" or argument not in _ELSEWHERE:
        return None
    return f"{key} cannot be set: {_ELSEWHERE[argument]}"


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
    deep_supervision: bool = key(
        False,
        "also train heads on the coarser stages of our U-Net; the trained network does not contain them",
    )
    overlap: float = key(
        0.5, "overlap of neighbouring windows over a volume, as a share of the window", ge=0, lt=1
    )
    sw_batch_size: int = key(4, "windows in one forward pass", ge=1)
    mirror_axes: Any = key(
        [],
        "spatial axes of mirror test-time augmentation, or `all`; axes of conv=mirror are skipped "
        "(no effect)",
        accepts=list[int] | Literal["all"],
        ge=0,
    )
    mixup: float = key(
        0.0,
        "for image-level targets: alpha of Beta(alpha, alpha), the weights of two mixed samples, such as 0.2",
        ge=0,
        lt=inf,
    )


@dataclass(frozen=True)
class PlanConfig:
    """Limits of the plan, and the parts of it that the user sets; null is planned."""

    size: str | None = key(
        None,
        "size of network, patch and batch: full, large, medium, small, tiny; null: full (on a CPU "
        "large), or with trainer.max_time the largest of which enough steps fit",
        choices=("full", "large", "medium", "small", "tiny"),
    )
    memory_gb: float | None = key(
        None, "device memory for a training step, in GB; null: measured (docs/planning.md)", gt=0, lt=inf
    )
    max_batch_size: int | None = key(
        None,
        "upper limit; null: that of the size, 4 or 2, in 2D 12 or 8, since short runs need many steps",
        ge=1,
    )
    max_stages: int | None = key(None, "upper limit; null: as many as the patch can be halved for", ge=1)
    strides: Any = key(
        None,
        "between stages, per axis, such as [[1,2,2],[2,2,2]]; null plans them",
        accepts=list[int | list[int]] | None,
        ge=1,
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
        "progressive trains on the middle of each patch, which grows until it is the whole; or "
        "whole; null: progressive for targets per voxel with our U-Net, unless it is compiled",
        choices=("progressive", "whole"),
    )


@dataclass(frozen=True)
class PerfConfig:
    """`perf=autotune` measures the values that are null."""

    # memory format and kernels
    channels_last: bool | None = key(True, "channels-last memory format; null: perf=autotune measures it")
    fast_norm: bool | None = key(
        True,
        "norms in channels-last, fused with the activation after them; batch and group norms on a GPU only",
    )
    fast_depthwise: bool = key(True, "depthwise 3D convolutions in bf16 on a CPU, in blocks of 16 channels")
    activation_checkpointing: str | None = key(
        "none",
        "recompute in the backward pass: none; pointwise (norms and activations); blocks (whole blocks)",
        choices=("none", "blocks", "pointwise"),
    )
    compile: bool | None = key(False, "torch.compile; takes about a minute, and may pay off in long runs")
    cuda_graphs: bool = key(False, "with compile, on a GPU: launch all kernels of a step at once")
    fused_optimizer: bool = key(True, "one kernel for all parameters, if the optimizer has one")
    matmul_precision: str = key(
        "high",
        "precision of fp32 products on GPUs: highest, high (TF32) or medium",
        choices=MATMUL_PRECISIONS,
    )
    # several processes
    stop_sync_interval: int = key(20, "batches between which the processes of a run share stop signals", ge=1)
    timeout_seconds: float = key(
        1800.0,
        "how long to wait for another process of the run, validation included, before it counts as lost",
        gt=0,
        lt=inf,
    )
    # measurements
    profile: bool = key(
        False, "true writes a torch.profiler trace of a few steps, with named ranges (NVTX on a GPU)"
    )
    auto_seconds: float = key(30.0, "how long perf=autotune measures", gt=0)
    auto_batch_size: bool = key(False, "perf=autotune: may also double data.batch_size repeatedly")


@dataclass(frozen=True)
class RunSettings:
    name: str | None = key(
        None, "the run's folder is runs/NAME; null: a name from the main choices and a hash of the config"
    )
    dir: str | None = key(None, "another folder instead", path=True)
    packages: list[str] = key([], "your own packages to import; the same as --package NAME")
    resume: str = key(
        "auto", "auto resumes a stopped run; never starts a new one; or a checkpoint to resume from"
    )
    dry_run: bool = key(
        False,
        "true: print what would be run (the config, a sweep's commands, or the script for Slurm) "
        "without running it",
    )
    checkpoint_interval: str = key(
        "00:00:10:00",
        "DD:HH:MM:SS between checkpoints; last.ckpt is also written after each validation",
        duration=True,
    )
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
        "2D weights in a 3D network: inflate repeats kernels along the new axis, acs distributes "
        "them over planes",
        choices=("inflate", "acs"),
    )
    freeze: Any = key(
        None,
        "regular expressions on parameter names, such as [encoder]; matching parameters are not trained",
        accepts=list[str] | None,
    )
    thaw_at: float | None = key(
        None,
        "share of the run, such as 0.1, after which the parameters of init.freeze train too, after "
        "another warm-up; null: never",
        gt=0,
        lt=1,
    )
    lr_multipliers: dict[str, float] | None = key(
        None, "learning rate factors by regular expression: {encoder: 0.1}", gt=0, lt=inf
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
        flip_label_pairs: outputs that a mirror exchanges, as numbers.
        train_cases: their number and a hash of their names.
        slice_axis: across the slices that a 2D network takes from volumes.
        memory_gb, size: that the run was planned for.
        batch_dice: whether one Dice over all samples of a batch suits them: not pictures of several kinds.
        stem: as `planning.topology.stem_for`.
        modalities: names of the channels; None: of earlier versions.
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
    size: str = MISSING
    stage_strides: list[list[int]] = MISSING
    monitor: str = MISSING
    monitor_mode: str = MISSING
    num_train_cases: int = MISSING
    batch_dice: bool = True  # of earlier runs, too
    stem: Node = MISSING
    modalities: list[str] | None = None


@dataclass(frozen=True)
class RunConfig:
    """The whole config of a run."""

    seed: int = key(0, "seed of initial weights, patches and augmentation", ge=0, le=2**32 - 1)
    tags: list[str] = key(
        [], "words that find a run again, such as [baseline,fold0]: in config.yaml, wandb and mlflow"
    )
    test: bool = key(
        False, "true: after the training, score the dataset's test cases with the best checkpoint"
    )
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


SHARED = "base"  # what the options of a group share is no option itself
_OF_HYDRA = "hydra"  # launchers and sweepers


def groups() -> list[str]:
    """Names of the config groups, such as `model` and `conv`, sorted."""
    folders = [path for path in conf_dir().iterdir() if path.is_dir()]
    return sorted(folder.name for folder in folders if folder.name != _OF_HYDRA)


def list_options(group: str, pattern: str = "*") -> list[str]:
    """Names of a config group's options, sorted, such as `customconv` and `segresnet` of `model`.

    Args:
        group: such as `model`, `conv`, `loss`, `data`, `augmentation` or `optimizer`.
        pattern: only names that match this shell pattern, such as `*unet*`.
    Raises:
        ConfigError: there is no such group; names all groups.
    """
    if group not in groups():
        raise ConfigError(f"there is no config group {group!r}; expected one of {', '.join(groups())}")
    names = {file.stem for file in (conf_dir() / group).glob("*.yaml")}
    names.discard(SHARED)
    return sorted(name for name in names if fnmatchcase(name, pattern))
