"""One training run, by `train`: from a config that `validate` has typed to the content of `summary.json`.

Its stages, in their order:
    check_config (`checks`): contradictions, and arguments that a class lacks; a dry run ends here
    with_devices: machines, devices and precision
    prepare_data (`data_setup`): finds, checks, plans and prepares the cases
    resolve: `loss=auto`, measured values, batch sizes, and every `${...}` that nodes have kept until here
    build_task, build_trainer, build_data (`build`, `trainer`, `data_setup`)
    RunDir.begin makes the folder, Lightning fits, and test cases are scored
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import OmegaConf
from torch import nn

from medconv import config as configs
from medconv import doors
from medconv.config import ConfigError, Derived, Node, RunConfig
from medconv.config.schema import open_keys
from medconv.data.loading.datamodule import DataModule
from medconv.performance.step_profiler import StepProfiler
from medconv.targets import Targets
from medconv.training import identity, memory_errors
from medconv.training.build import build_task, record_of
from medconv.training.callbacks.validated import stopped_early
from medconv.training.checkpoint.compatibility import (
    check_has_training_state,
    check_not_finished,
    check_same_freezing,
    check_same_optimizer,
    check_same_sharding,
    check_same_task,
    check_weights_fit,
)
from medconv.training.checks import check_config
from medconv.training.data_setup import PreparedData, build_data, prepare_data
from medconv.training.distributed import batch_size_per_process, processes
from medconv.training.growing_patch import may_grow
from medconv.training.loggers import announce, log_hyperparameters, log_start_texts
from medconv.training.optim.build import knows_progress, with_epochs
from medconv.training.run_dir import RunDir
from medconv.training.task import Task
from medconv.training.trainer import build_trainer, epochs_of
from medconv.training.weight_source import weight_source
from medconv.utils import checkpoint_io, cluster, signals
from medconv.utils.exit_codes import DONE
from medconv.utils.hardware import (
    check_devices,
    expand_segments,
    keep_freed_memory,
    resolve_precision,
    set_matmul_precision,
    uses_gpu,
    warn_slow_cudnn,
)
from medconv.utils.logging import route_lightning

_SAMPLES_PER_EPOCH = 1000  # patches, where the config sets no number

log = logging.getLogger(__name__)


def train(config: RunConfig, folder: RunDir) -> Node:
    """Trains the run of a checked config.

    Returns:
        The content of `summary.json`.
    Raises:
        ValueError: the user's data or configuration is wrong.
        RunInterrupted: a signal stopped the run.
    """
    route_lightning()
    try:
        with signals.raising(), closing(folder), cluster.sharing_errors(folder.path):
            return _train(config, folder)
    except signals.RunInterrupted as stopped:
        if stopped.number == signal.SIGUSR1 and cluster.is_first():
            signals.requeue()
        if stopped.agreed and not cluster.is_first() and cluster.launcher() is None:
            # Lightning kills the first process if one that it started ends with an error
            raise SystemExit(DONE) from None
        raise


def _train(config: RunConfig, folder: RunDir) -> Node:
    config, prepared = prepare(config, folder)
    resolved = resolve(config, prepared, folder)
    if config.test:
        check_has_test_cases(prepared)
    finished = folder.finished(resolved, prepared.identity)
    # An earlier start of the run may have scored its test cases
    if finished and (not config.test or "test/cases" in folder.summary()):
        log.info("this run is finished; run.resume=never trains it again")
        return folder.summary()
    load_weights = pretrained_weights(config, resolved.derived, folder)
    set_matmul_precision(resolved.perf.matmul_precision)
    if uses_gpu(resolved.trainer.accelerator):
        warn_slow_cudnn()
    profiler = StepProfiler(resolved.perf.profile, folder.started_at)
    stop_request = signals.StopRequest()
    run = _Run(
        config=resolved,
        prepared=prepared,
        folder=folder,
        task=build_task(resolved, record_of(resolved, prepared), load_weights),
        trainer=build_trainer(resolved, folder, profiler, prepared, stop_request),
        data=build_data(resolved, prepared, profiler, stop_request),
        profiler=profiler,
        stop_request=stop_request,
    )
    announce(resolved, prepared, run.task, run.trainer, folder)
    if folder.resume not in ("auto", "never"):
        _check_checkpoint(folder.resume, run)
        identity.warn_of_other_data(Path(folder.resume), prepared.identity)
    if load_weights:
        _warn_of_seen_cases(config, prepared)
    if not finished:
        _fit(run)
    if resolved.test:
        _check_not_stopped(run)
        with _explaining(run):
            score_test_cases(run.trainer, run.task, run.data, folder)
    return folder.summary()


def prepare(config: RunConfig, folder: RunDir) -> tuple[RunConfig, PreparedData]:
    """Seeds all random numbers, checks settings, and prepares the data.

    Returns:
        The config with devices and precision chosen, whose nodes keep their interpolations; the data.
    Raises:
        ValueError: the user's data or configuration is wrong.
    """
    if config.trainer.deterministic:
        # cuBLAS reads it once, at the first matrix product, which may be one of a measurement
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Before anything is measured
    if not uses_gpu(config.trainer.accelerator):
        keep_freed_memory()
    elif may_grow(config) and not config.perf.cuda_graphs:  # graphs have memory of their own
        expand_segments()
    check_config(config)
    config = replace(config, scheduler=with_epochs(config.scheduler, epochs_of(config.trainer)))
    L.seed_everything(config.seed, workers=True, verbose=False)
    if config.init.pretrained is not None:
        config = weight_source(config.init.pretrained).settings(config)
    config = with_devices(config)
    return config, prepare_data(config, earlier_plan=folder.earlier_plan())


@configs.arguments_as_keys("trainer")
def with_devices(config: RunConfig) -> RunConfig:
    """The config with the number of machines and devices that the run was launched with, and its precision.

    Raises:
        ValueError: this machine lacks the devices, or they lack the precision.
    """
    trainer = config.trainer
    num_nodes, devices = cluster.processes(trainer.num_nodes, trainer.devices)
    devices = check_devices(devices, trainer.accelerator, cluster.launcher() is not None)
    precision = resolve_precision(trainer.precision, trainer.accelerator)
    trainer = replace(trainer, num_nodes=num_nodes, devices=devices, precision=precision)
    return replace(config, trainer=trainer)


@dataclass(frozen=True)
class _Run:
    """What a run trains with, built from its resolved config."""

    config: RunConfig
    prepared: PreparedData
    folder: RunDir
    task: Task
    trainer: L.Trainer
    data: DataModule
    profiler: StepProfiler
    stop_request: signals.StopRequest


def _fit(run: _Run) -> None:
    folder = run.folder
    trainer = run.trainer
    folder.begin(run.config, run.prepared.identity)
    remarks = tuple(doors.objects(doors.REMARKS)) if cluster.is_first() else ()
    for remark in remarks:
        folder.write_summary(**remark.before(run.config))
    folder.write_summary(
        skipped_cases=run.prepared.skipped,
        split_warning=run.prepared.split_warning,
        score=run.prepared.targets.monitored.plain(),
        targets=run.prepared.targets.plain(),
    )
    with folder.recording(trainer, run.profiler), _explaining(run):
        if cluster.is_first() and folder.resume_from() is None:
            log_start_texts(trainer, run.config, run.prepared.plan)
        with run.stop_request.noted():
            trainer.fit(run.task, run.data, ckpt_path=folder.resume_from(), weights_only=True)
        folder.write_summary(stopped_early=stopped_early(trainer))
    for remark in remarks:
        folder.write_summary(**remark.after(run.config, run.profiler))
    if cluster.is_first():
        log_hyperparameters(trainer, run.config, folder)


@contextmanager
def _explaining(run: _Run) -> Iterator[None]:
    """Inside, lost processes and memory errors end the run with what to do about them."""
    with (
        cluster.detecting_lost_peers() if run.trainer.world_size > 1 else nullcontext(),
        configs.arguments_as_keys("data"),
    ):
        try:
            yield
        except memory_errors.ERRORS as error:
            memory_errors.raise_advice(error, run.config.data)
            raise


def resolve(config: RunConfig, prepared: PreparedData, folder: RunDir) -> RunConfig:
    """The config with every value filled in: what data, plan and targets decide.

    Args: config: of `prepare`.
    """
    config = with_loss(config, prepared.targets)
    resolved = configs.with_derived(config, prepared.derived)
    num_samples = resolved.data.samples_per_epoch
    if num_samples is None:
        whole_images = prepared.targets.family.own("whole_images")
        num_samples = _SAMPLES_PER_EPOCH
        if whole_images:
            # Of all cases, which folds share: they are compared by their configs. A file may name fewer
            num_cases = len(prepared.dataset.cases) - len(prepared.test)
            if resolved.data.splits_file is not None:
                num_cases = len(prepared.train) + len(prepared.val)
            num_samples = whole_images.samples_per_epoch(num_cases)
    resolved = replace(
        resolved,
        model=prepared.targets.model(resolved.model),
        data=replace(
            resolved.data,
            batch_size=prepared.plan.batch_size,
            source_spacing_mm=prepared.source_spacing_mm,
            samples_per_epoch=num_samples,
        ),
    )
    keys = open_keys(resolved)
    if keys:
        resolved = _tuned(resolved, keys, folder)
    data = resolved.data
    if data.global_batch_size is None:  # that of the run to resume
        data = replace(data, global_batch_size=folder.global_batch_size())
    size = batch_size_per_process(replace(resolved, data=data)) * processes(resolved.trainer)
    return replace(resolved, data=replace(data, global_batch_size=size))


def _tuned(config: RunConfig, keys: Sequence[str], folder: RunDir) -> RunConfig:
    """The config with the fastest values for the keys that it leaves open, by measured steps.

    Raises:
        ConfigError: no feature measures them, or none of the values works.
    """
    tune = doors.named(doors.TUNERS, "settings")
    if tune is None:
        raise ConfigError(
            f"{', '.join(keys)}: null is measured by medconv.features.autotune, which this "
            "installation lacks; perf=fast sets values"
        )
    tuned: RunConfig = tune(config, folder)
    return tuned


def with_loss(config: RunConfig, targets: Targets) -> RunConfig:
    """The config with the targets' default loss for `loss=auto`.

    Raises: ConfigError: these are targets of a package of the user's own, whose loss has to be named.
    """
    if config.loss.get("_target_") is not None:
        return config
    path = configs.conf_dir() / "loss" / f"{targets.default_loss}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"loss=auto: {targets.kind} targets name {targets.default_loss}, which is not in conf/loss; set "
            f"loss={targets.default_loss}, with --config-dir"
        )
    loss: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    set_by_user = {key: value for key, value in config.loss.items() if key != "_target_"}
    return replace(config, loss={**loss, **set_by_user})


def _check_checkpoint(path: str, run: _Run) -> None:
    """Raises: ValueError: the checkpoint of `run.resume` does not fit this run."""
    config = run.config
    task = run.task
    content = checkpoint_io.read(Path(path))
    setting = f"run.resume={path}"
    # A ProgressSchedule computes the learning rate anew, from the config of this run
    new_lr = knows_progress(config.scheduler)
    check_has_training_state(content, setting)
    check_same_task(content, config.derived, setting)
    check_same_freezing(content, config.init, setting)
    check_same_sharding(content, config.trainer.strategy, setting)
    check_weights_fit(task, content, setting)
    check_same_optimizer(content, config, setting, new_lr=new_lr)
    check_not_finished(
        content,
        max_steps=run.trainer.max_steps,
        max_epochs=run.trainer.max_epochs or -1,
        max_seconds=config.trainer.max_seconds,
        setting=setting,
    )


def pretrained_weights(
    config: RunConfig, derived: Derived, folder: RunDir
) -> Callable[[nn.Module], Any] | None:
    """Loads the weights of `init.pretrained` into a network. None: it is not set, or a resumed run has those
    of its checkpoint.

    Args:
        config: with its interpolations.
    """
    if not config.init.pretrained:
        return None
    if folder.resume_from() is not None:
        if folder.resume != "auto":
            log.info(
                "init.pretrained=%s is not loaded, as the weights are those of run.resume=%s",
                config.init.pretrained,
                folder.resume,
            )
        return None
    return partial(weight_source(config.init.pretrained).load, config=config, derived=derived)


def _warn_of_seen_cases(config: RunConfig, prepared: PreparedData) -> None:
    """Where the pretrained weights are a checkpoint in the folder of a run of other training cases."""
    weights = Path(str(config.init.pretrained)).resolve()
    same_root = False
    with suppress(ConfigError, KeyError, TypeError):  # no run's folder, or of an earlier version
        root = RunDir(weights.parent.parent, "never").earlier_config()["data"]["root"]
        roots = [Path(each).resolve() for each in (root, config.data.root) if each]
        same_root = len(roots) == 2 and roots[0] == roots[1]
    identity.warn_of_seen_cases(weights, prepared.identity, same_root)


def check_has_test_cases(prepared: PreparedData) -> None:
    """Raises: ConfigError: the dataset names no test cases."""
    if not prepared.test:
        raise ConfigError(
            f"test=true: {prepared.dataset.name} names no test cases, as MedMNIST and a table's `split` "
            "do; other images are scored by medconv predict and medconv evaluate"
        )


def _check_not_stopped(run: _Run) -> None:
    """Raises: signals.RunInterrupted: a stop was asked for when training had ended; a later start tests."""
    number = run.stop_request.number
    if run.trainer.strategy.reduce_boolean_decision(bool(number), all=False):
        raise signals.RunInterrupted(number or signal.SIGTERM, agreed=True)


def score_test_cases(trainer: L.Trainer, task: Task, data: DataModule, folder: RunDir) -> None:
    """Writes `test/cases` and the scores over them to `summary.json`; all ranks take their share of cases."""
    task.rows = {}  # of validation, and no test case may follow
    trainer.test(task, datamodule=data, ckpt_path=str(folder.trained), weights_only=True, verbose=False)
    if not task.rows:
        log.warning("test=true: trainer.limit_test_batches=%s left no test case", trainer.limit_test_batches)
        return
    scores = task.targets.scores.summary(task.rows)
    values = {f"test/{name}": value for name, value in scores.items()}
    folder.write_summary(**values, **{"test/cases": task.rows})
    # Per-class scores are lists or dictionaries; the log shows the means alone
    means = [f"{name} {value:.4f}" for name, value in scores.items() if isinstance(value, float)]
    log.info("test: %d cases, %s: %s", len(task.rows), folder.trained.name, ", ".join(means))
