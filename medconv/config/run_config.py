"""From a composed config to a `RunConfig`: checked, then with every value filled in; and back from a file."""

from collections.abc import Callable
from dataclasses import asdict, field, fields, make_dataclass
from functools import cache
from inspect import signature
from typing import Any, get_args

from omegaconf import Container, DictConfig, OmegaConf

from medconv.config.instantiate import check_importable, check_no_interpolation, check_types, iter_targets
from medconv.config.schema import DataConfig, Derived, Node, RunConfig, TrainerConfig
from medconv.config.values import ConfigError, duration_seconds

_GROUPS_WITH_CLASSES = (
    *("model", "conv", "loss", "optimizer", "scheduler"),
    *("weight_averaging", "early_stopping", "sampler", "augmentation", "trainer"),
)
# Arguments of Lightning's Trainer that are set elsewhere, and where.
_ELSEWHERE = {
    "callbacks": "add callbacks by +callbacks.NAME._target_=CLASS",
    "logger": "choose loggers by logger=NAME, or add one by +logger.NAME._target_=CLASS",
    "default_root_dir": "run.dir is the run's folder",
    "enable_checkpointing": "every run writes checkpoints; run.checkpoint_interval says how often",
    "use_distributed_sampler": "medconv divides the cases over the devices itself",
}


def validate(composed: DictConfig) -> RunConfig:
    """The config of a run, with every value converted to its type; nodes keep their interpolations.

    Raises: omegaconf.errors.OmegaConfBaseException: an unknown key or a wrong type, with its full key;
        ConfigError: a `_target_` that cannot be imported, a wrong type for one of ours, a key of `trainer`
        that is set elsewhere, a value in place of a group, or an invalid duration or interval.
    """
    composed = _without_ckpt_path(composed)
    single = ("seed", "tags", "test")
    groups = [f.name for f in fields(RunConfig) if f.name in composed and f.name not in single]
    for name in groups:
        if not OmegaConf.is_config(composed[name]):
            raise ConfigError(f"{name}={composed[name]}: {name} is no single value; set one of its keys")
    for key in composed.trainer:
        if error := place_elsewhere(f"trainer.{key}"):
            raise ConfigError(error)
    typed = _typed(composed)
    _check_intervals(typed)
    for group in _GROUPS_WITH_CLASSES:
        node = OmegaConf.to_container(typed[group], resolve=False)
        for key, target in iter_targets(node, group):
            check_importable(key, target)
        check_types(node, group)
    frozen: dict[str, Any] = {name: _plain_or_frozen(typed[name]) for name in typed if name != "derived"}
    return RunConfig(**frozen)


def _check_intervals(typed: DictConfig) -> None:
    trainer = typed.trainer
    if trainer.max_time is not None:
        duration_seconds(trainer.max_time, "trainer.max_time", positive=True)
    duration_seconds(typed.run.checkpoint_interval, "run.checkpoint_interval")
    for key in ("check_val_every_n_epoch", "val_check_interval"):
        if isinstance(trainer[key], (int, float)) and trainer[key] <= 0:
            raise ConfigError(f"trainer.{key} must be more than 0, or null, got {trainer[key]}")


def _without_ckpt_path(composed: DictConfig) -> DictConfig:
    """`ckpt_path`, as other templates of Lightning name it, becomes `run.resume`.

    Raises: ConfigError: both are set.
    """
    values: Any = {key: value for key, value in composed.items_ex(resolve=False) if key != "ckpt_path"}
    path = composed.get("ckpt_path")
    if path is not None:
        if composed.run.resume != "auto":
            raise ConfigError(
                f"ckpt_path={path} is the same as run.resume={composed.run.resume}; set only one"
            )
        values = {**values, "run": {**composed.run, "resume": str(path)}}
    without: DictConfig = OmegaConf.create(values)
    return without


def data_of(composed: DictConfig) -> DataConfig:
    """Only `data` of a composed config, which may have groups of Hydra's own. Raises: as `validate`."""
    return OmegaConf.to_object(_typed({"data": composed.data}).data)  # type: ignore[return-value]


def resolve(config: RunConfig, derived: Derived) -> RunConfig:
    """The same config with `derived` filled in, and every interpolation replaced.

    Raises: omegaconf.errors.OmegaConfBaseException: an interpolation of a key that does not exist.
    """
    return OmegaConf.to_object(_typed({**config.plain(), "derived": asdict(derived)}))  # type: ignore[return-value]


def from_plain(values: Node) -> RunConfig:
    """The resolved config of a checkpoint, which may be malicious; inverse of `RunConfig.plain`.

    Keys of `trainer` that only another version of Lightning has are left out.
    Raises: ConfigError: an interpolation. OmegaConfBaseException: a missing key or a wrong type. LookupError,
        TypeError, AttributeError: it is no config.
    """
    check_no_interpolation(values, "config")
    ours = {entry.name for entry in fields(TrainerConfig)}
    trainer = {key: value for key, value in values["trainer"].items() if key in ours}
    known: Any = {**values, "trainer": trainer}
    typed = OmegaConf.merge(_unlocked(RunConfig()), known)
    return OmegaConf.to_object(typed)  # type: ignore[return-value]


@cache
def trainer_schema(trainer: Callable[..., Any]) -> type[TrainerConfig]:
    """`TrainerConfig` with all other arguments of Lightning's Trainer, with its types and defaults."""
    ours = {entry.name for entry in fields(TrainerConfig)}
    theirs = [
        (name, _type_of(argument.annotation), field(default=argument.default))
        for name, argument in signature(trainer).parameters.items()
        if argument.default is not argument.empty and name not in {*ours, *_ELSEWHERE}
    ]
    return make_dataclass("TrainerConfig", theirs, bases=(TrainerConfig,), frozen=True)


def place_elsewhere(key: str) -> str | None:
    """For an argument of Lightning's Trainer that is not set by its key, an error that says what sets it."""
    place = _ELSEWHERE.get(key.removeprefix("trainer."))
    return f"{key} cannot be set: {place}" if place and key.startswith("trainer.") else None


def _type_of(annotation: Any) -> Any:
    """The annotation if OmegaConf can check it, else Any."""
    parts = get_args(annotation) or (annotation,)
    return annotation if set(parts) <= {bool, int, float, str, type(None)} else Any


def _typed(values: Any) -> Any:
    """The values in OmegaConf's nodes of their types. Raises: OmegaConfBaseException: as `validate`."""
    from lightning import Trainer  # loads torch, which printing a config does not need

    return OmegaConf.merge(_unlocked(RunConfig(trainer=trainer_schema(Trainer)())), values)


def _unlocked(config: RunConfig) -> DictConfig:
    """The config as a schema that can be filled in, which OmegaConf denies frozen classes."""
    schema: DictConfig = OmegaConf.structured(config)
    for entry in fields(config):
        if isinstance(node := schema._get_node(entry.name), Container):
            OmegaConf.set_readonly(node, False)
    return schema


def _plain_or_frozen(value: Any) -> Any:
    """A frozen dataclass for a typed group; for others plain values with their interpolations."""
    if not OmegaConf.is_config(value):
        return value
    typed = OmegaConf.get_type(value) is not dict
    return OmegaConf.to_object(value) if typed else OmegaConf.to_container(value, resolve=False)
