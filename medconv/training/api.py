"""Training from Python: `medconv.compose`, `medconv.train` and `medconv.prepare`."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medconv.config import ConfigError, RunConfig, validate
from medconv.config.compose import Composer, as_override, hydra_flags
from medconv.data.loading.datamodule import DataModule
from medconv.targets import Targets
from medconv.targets.scores import metric_of_summary
from medconv.training import run
from medconv.training.build import build_task, record_of
from medconv.training.data_setup import build_data
from medconv.training.distributed import processes
from medconv.training.run import with_devices
from medconv.training.run_dir import RunDir, default_name
from medconv.training.task import Task
from medconv.utils.exit_codes import PREEMPTED
from medconv.utils.hardware import set_matmul_precision
from medconv.utils.logging import logging_of_a_call
from medconv.utils.signals import RunInterrupted

log = logging.getLogger(__name__)
_COMMAND = "the command `medconv train`"


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Args:
        folder: with the checkpoints, logs and `summary.json`.
        checkpoint: the best one, for `medconv.load`; the last one if nothing was validated.
        score: the metric by which the best checkpoint was chosen, such as the mean Dice over foreground
            classes, from 0 to 1; None if nothing was validated.
        scores: what `medconv train` prints at the end by name, for label maps the Dice of each class and
            their mean; None where a score is undefined.
        summary: the content of `summary.json`.
    """

    folder: Path
    checkpoint: Path
    score: float | None
    scores: dict[str, float | None]
    summary: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, folder: RunDir) -> "TrainResult":
        """The result of the run in this folder."""
        summary = folder.summary()
        targets = Targets.from_plain(summary["targets"])
        return cls(
            folder=folder.path,
            checkpoint=folder.trained,
            score=summary.get(metric_of_summary(summary).name),
            scores=dict(targets.scores.table(summary)),
            summary=summary,
        )


@dataclass(frozen=True)
class Prepared:
    """What a training loop needs.

    Args:
        task: a Lightning module: network, loss, optimizer, learning rate schedule and validation.
        data: a Lightning data module, whose loaders draw augmented patches.
        config: with every value filled in, such as the planned patch size and batch size.
    """

    task: Task
    data: DataModule
    config: RunConfig = field(repr=False)


def compose(
    overrides: Sequence[str] = (), *, config_dir: Path | str | None = None, **values: Any
) -> RunConfig:
    """The config of one run, from the same options and keys as `medconv train` has.

    Args:
        overrides: as on the command line, `model=segresnet` or `trainer.max_steps=100`.
        config_dir: a folder with options of your own, `config_dir/GROUP/OPTION.yaml`.
        values: groups and keys, with two underscores for each dot: `model="segresnet"`,
            `trainer__max_steps=100`. A value is None, bool, a number, text, a path, or a list or dict of
            these.
    Returns:
        The checked config. `run.name` is filled in, so that the same config is the same run.
    Raises:
        ConfigError: a key or option that does not exist, or a value of a wrong type.
        HydraException, OmegaConfBaseException: as Hydra raises them.
    """
    arguments = _arguments(overrides, config_dir, values)
    with logging_of_a_call(of_a_later_run=True):
        composer = Composer(hydra_flags(arguments, "medconv train"))
        if composer.is_sweep:
            raise ConfigError(f"hydra.mode=MULTIRUN: sweeps need {_COMMAND} -m")
        (composed,) = composer.configs()
        if composed.settings.job.env_set:
            raise ConfigError("hydra.job.env_set: set the variables in os.environ before medconv is imported")
        config = validate(composed.values)
    if config.run.dir or config.run.name:
        return config
    name = default_name(config, composed.choices)
    return replace(config, run=replace(config.run, name=name))


def train(
    config: RunConfig | Sequence[str] = (), *, config_dir: Path | str | None = None, **values: Any
) -> TrainResult:
    """Trains one run on one device, as `medconv train` does, and resumes it if it was stopped.

    A run that is finished is not trained again. Ctrl-C, or "interrupt" in a notebook, stops after the step
    and saves a checkpoint: the same call resumes.

    Args:
        config: from `compose`; or overrides, as of `compose`.
        config_dir: as of `compose`.
        values: as of `compose`.
    Raises:
        ValueError: the data or configuration is wrong, such as more than one device.
        KeyboardInterrupt: the run was interrupted by hand.
        SystemExit: the process was asked to end by a signal, with the exit code 75.
    """
    config = _config_of(config, config_dir, values)
    folder = RunDir.of(config, choices={})
    with logging_of_a_call():
        _check_one_device(config)
        with _interrupts_raised():
            run.train(config, folder)
    return TrainResult.of(folder)


def prepare(
    config: RunConfig | Sequence[str] = (), *, config_dir: Path | str | None = None, **values: Any
) -> Prepared:
    """Task and data of a run, for a training loop of your own, such as `lightning.Trainer().fit(task, data)`.

    Preprocesses the data, plans what is not set, and seeds all random numbers, as `train` does. It writes
    no run folder. Keys of `trainer`, `run`, `logger`, `callbacks`, `weight_averaging` and `early_stopping`
    are those of a trainer, so that the loop decides about them. `init.thaw_at` needs the callback `Thaw`.

    Args:
        config: from `compose`; or overrides, as of `compose`.
        config_dir: as of `compose`.
        values: as of `compose`.
    Raises:
        ValueError: the data or configuration is wrong, such as more than one device.
    """
    config = _config_of(config, config_dir, values)
    # An earlier run there is neither resumed nor changed.
    folder = replace(RunDir.of(config, choices={}), resume="never")
    with logging_of_a_call():
        _check_one_device(config)
        config, prepared = run.prepare(config, folder)
        resolved = run.resolve(config, prepared, folder)
        load_weights = run.pretrained_weights(config, resolved.derived, folder)
        set_matmul_precision(resolved.perf.matmul_precision)
        task = build_task(resolved, record_of(resolved, prepared), load_weights)
        data = build_data(resolved, prepared)
        init = resolved.init
        if init.thaw_at is not None:
            log.warning(
                "init.thaw_at=%g: all layers train from the start, unless your trainer has the callback "
                "medconv.training.callbacks.thaw.Thaw(%s, %g)",
                init.thaw_at,
                init.freeze,
                init.thaw_at,
            )
    return Prepared(task=task, data=data, config=resolved)


def _arguments(overrides: Sequence[str], config_dir: Path | str | None, values: dict[str, Any]) -> list[str]:
    """The arguments of the same `medconv train`."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list, got {overrides!r}; write [{overrides!r}]")
    for override in overrides:
        if override.startswith("-"):
            raise ConfigError(f"{override}: flags are for {_COMMAND}; config_dir=DIR is an argument")
    arguments = [*overrides, *(as_override(name, value) for name, value in values.items())]
    if config_dir is not None:
        arguments = ["--config-dir", str(config_dir), *arguments]
    return arguments


def _config_of(
    config: RunConfig | Sequence[str], config_dir: Path | str | None, values: dict[str, Any]
) -> RunConfig:
    if not isinstance(config, RunConfig):
        config = compose(config, config_dir=config_dir, **values)
    elif values or config_dir is not None:
        names = ", ".join([*values, *(["config_dir"] if config_dir is not None else [])])
        raise ConfigError(f"{names}: has no effect on a composed config; pass it to medconv.compose")
    if config.run.dry_run:
        raise ConfigError(
            f"run.dry_run=true: only {_COMMAND} prints a plan; medconv.compose gives the config"
        )
    return config


def _check_one_device(config: RunConfig) -> None:
    """Raises: ConfigError: several processes would be needed, which only the command starts."""
    if processes(with_devices(config).trainer) == 1:
        return
    raise ConfigError(
        f"trainer.devices={config.trainer.devices}, trainer.num_nodes={config.trainer.num_nodes}: from "
        f"Python a run has one device, so set trainer.devices=1; for several take {_COMMAND}"
    )


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Inside, Ctrl-C raises `KeyboardInterrupt`, which a notebook shows; other signals end the process."""
    try:
        yield
    except SystemExit as stopped:
        # Lightning turns a second Ctrl-C, which saves nothing, into this.
        is_aborted = isinstance(stopped.__context__, KeyboardInterrupt)
        is_interrupted = isinstance(stopped, RunInterrupted) and stopped.by_hand
        if is_aborted or is_interrupted:
            raise KeyboardInterrupt("the same call resumes the run") from None
        if isinstance(stopped, RunInterrupted):
            # The exit code of a script that is not told what to do with it; a scheduler may start it again.
            stopped.code = PREEMPTED
        raise
