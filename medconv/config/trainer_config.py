"""The keys of `trainer`: the arguments of Lightning's `Trainer`, whatever its version."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from inspect import signature
from typing import Any, Literal

from medconv.config.keys import key
from medconv.config.value_types import is_plain
from medconv.config.values import duration_seconds
from medconv.utils.precisions import PRECISIONS

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
        "auto: bf16-mixed where the hardware is fast at it; null: perf=autotune measures it",
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
    max_epochs: int | None = key(None, "null: 100, unless max_time or max_steps is set", ge=-1)
    max_steps: int = key(-1, "optimizer steps; -1: no limit", ge=-1)
    accumulate_grad_batches: int = key(1, "batches before each optimizer step", ge=1)
    gradient_clip_val: float | None = key(None, "largest norm of the gradient; null does not clip", ge=0)
    benchmark: bool | None = key(
        None, "null: cuDNN tries its algorithms on a GPU, unless trainer.deterministic is set"
    )
    deterministic: Any = key(
        None, "true: deterministic algorithms alone; slower on GPUs", accepts=bool | Literal["warn"] | None
    )
    sync_batchnorm: bool = key(False, "batch norms over all GPUs")
    # whole numbers are batches, fractions are shares, as in Lightning
    limit_train_batches: Any = key(
        None, "batches of an epoch, or a share of them", accepts=float | None, ge=0
    )
    limit_val_batches: Any = key(None, "validation cases, or a share of them", accepts=float | None, ge=0)
    limit_test_batches: Any = key(None, "test cases, or a share of them", accepts=float | None, ge=0)
    limit_predict_batches: Any = key(None, "not used: medconv predict predicts", accepts=float | None, ge=0)
    # Lightning accepts 0 and then never validates
    check_val_every_n_epoch: int | None = key(1, "epochs between validations", gt=0)
    val_check_interval: Any = key(
        None,
        "batches between validations, a share of an epoch, or a duration",
        accepts=float | str | dict[str, Any] | None,
        gt=0,
    )
    enable_progress_bar: bool = key(True, "in a terminal")
    model_registry: str | None = key(None, "not used: checkpoints are files")
    plugins: Any = key(None, "a list of nodes with _target_")

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
        (name, _type_of(argument.annotation), field(default=argument.default))
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


def _type_of(annotation: Any) -> Any:
    """The annotation if OmegaConf can check it, else Any."""
    return annotation if is_plain(annotation) else Any
