"""What a run logs: what it is about to train, `metrics.csv`, and for TensorBoard curves, texts and
hyperparameters.
"""

import csv
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.tensorboard.summary import hparams

from medconv import config as configs
from medconv.config import DataConfig, RunConfig, TaskConfig
from medconv.config.values import to_yaml
from medconv.models.layers.depthwise import has_depthwise
from medconv.models.layers.fast_norm import SWAPPED
from medconv.planning.planner import Plan
from medconv.planning.report import table
from medconv.targets.scores import metric_of_summary
from medconv.training.data_setup import PreparedData
from medconv.training.distributed import batch_size_per_process, has_parts
from medconv.training.run_dir import RunDir
from medconv.training.task import Task
from medconv.utils.atomic_io import replacing
from medconv.utils.hardware import triton_missing, uses_gpu
from medconv.utils.logging import size_text

# Environment variable of a sweep's job: its own overrides, as JSON.
HPARAMS = "MEDCONV_HPARAMS"

log = logging.getLogger(__name__)


class CsvLogger(Logger):
    """Appends a row per step, and keeps earlier rows when a run resumes; a new column rewrites the file once.

    Lightning's CSVLogger deletes the file when a run resumes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        # Read at the first row; until then the file may be moved
        self.columns: list[str] | None = None

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        return self.path

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The hyperparameters are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.columns is None:
            self.columns = self._existing_columns()
        row = {"step": step, **metrics}
        new_columns = [name for name in row if name not in self.columns]
        if new_columns:
            self._add_columns(new_columns)
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(row)
        except OSError as error:
            # The error of a full disk names no file
            error.filename = str(self.path)
            raise

    def _existing_columns(self) -> list[str]:
        """Columns of the file of a resumed run. An incomplete last line, left by a kill, is removed."""
        if not self.path.is_file():
            return []
        content = self.path.read_bytes()
        complete_bytes = content.rfind(b"\n") + 1
        if complete_bytes < len(content):
            self.path.write_bytes(content[:complete_bytes])
        with self.path.open(newline="") as file:
            return next(csv.reader(file), [])

    def _add_columns(self, names: list[str]) -> None:
        rows: list[dict[str, str]] = []
        if self.path.is_file():
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        self.columns = [*(self.columns or []), *names]
        with replacing(self.path) as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)


class TensorBoard(TensorBoardLogger):
    """Lightning's logger without a curve of the epoch, which Lightning adds to all metrics."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        curves = {name: value for name, value in metrics.items() if name != "epoch"}
        if curves:
            super().log_metrics(curves, step)

    @rank_zero_only
    def log_text(self, tag: str, text: str) -> None:
        """Text as it is, in a font of fixed width."""
        # TensorBoard renders Markdown; indented lines are a block of code
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self.experiment.add_text(tag, indented, 0)

    @rank_zero_only
    def log_hparams_page(self, params: Mapping[str, Any], curve: str) -> None:
        """One row of the HPARAMS page: hyperparameters, and the last value of a curve that was logged.

        Lightning's `log_hyperparams` would write the metric once more, as a curve of one point.
        """
        writer = self.experiment._get_file_writer()
        # The value 0 is a placeholder: the page reads the value from the curve
        for summary in hparams(dict(params), {curve: 0.0}):
            writer.add_summary(summary)
        self.finalize("success")


def announce(config: RunConfig, prepared: PreparedData, task: Task, trainer: Trainer, folder: RunDir) -> None:
    """Log what is about to be trained."""
    derived = config.derived
    network = task.network
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    log.info(
        "data: %s, %d cases to train on, %d to validate",
        prepared.dataset.name,
        len(prepared.train),
        len(prepared.val),
    )
    batch_size = (config.data.global_batch_size or 1) * trainer.accumulate_grad_batches
    log.info(
        "patch: %s voxels of %s mm, %d samples in each step",
        size_text(derived.patch_size),
        size_text(derived.spacing_mm),
        batch_size,
    )
    if has_parts(config):
        log.info(
            "batch: %d samples on each device, computed %d at a time",
            batch_size_per_process(config),
            config.data.batch_size,
        )
    if task.growing_patch is not None:
        sizes = task.growing_patch.sizes(derived.patch_size)
        limit = task.growing_patch.max_sizes
        why = "" if limit is None else f"; at most {limit}, since cuDNN tries its algorithms for each"
        log.info("patches grow: %d sizes, from %s voxels%s", len(sizes), size_text(sizes[0]), why)
    if derived.slice_axis is not None:
        axis = ("right", "anterior", "superior")[derived.slice_axis]
        log.info("slices: 2D, across the %s axis of the volumes", axis)
    log.info("model: %s, %.2f million parameters", config.model["_target_"], num_parameters / 1e6)
    class_weights = config.loss.get("class_weights")
    if class_weights not in (None, "none"):
        log.info("loss: class weights %s", class_weights)
    device = trainer.strategy.root_device.type
    log.info("trainer: %d x %s, precision %s", trainer.world_size, device, trainer.precision)
    log.info("run: %s", folder.path)
    log.debug("parameters: %s", ", ".join(name for name, _ in network.named_parameters()))
    for line in without_effect(config, network):
        log.warning("%s", line)
    has_fast_norms = any(isinstance(layer, SWAPPED) for layer in network.modules())
    if config.perf.fast_norm and has_fast_norms and uses_gpu(config.trainer.accelerator):
        missing = triton_missing()
        if missing is not None:
            log.warning("perf.fast_norm=true: norms are several times slower than they could be: %s", missing)


def without_effect(config: RunConfig, network: nn.Module) -> list[str]:
    """One line for each setting that is on but has no effect here, with the reason.

    Args: config: resolved.
    """
    perf = config.perf
    trainer = config.trainer
    no_gpu = not uses_gpu(trainer.accelerator)
    has_fast_norms = any(isinstance(layer, SWAPPED) for layer in network.modules())
    reasons = {}
    if trainer.benchmark and no_gpu:
        reasons["trainer.benchmark=true"] = "cuDNN runs on NVIDIA GPUs only"
    if perf.cuda_graphs and no_gpu:
        reasons["perf.cuda_graphs=true"] = "there is no GPU to replay them on"
    if trainer.sync_batchnorm and no_gpu:
        reasons["trainer.sync_batchnorm=true"] = "PyTorch supports it on GPUs only"
    if perf.fast_norm and not perf.channels_last:
        reasons["perf.fast_norm=true"] = "it needs perf.channels_last=true"
    elif perf.fast_norm and not has_fast_norms:
        reasons["perf.fast_norm=true"] = "this network has no instance, group or batch norms"
    if not perf.fast_depthwise and not has_depthwise(network):  # true is the default
        reasons["perf.fast_depthwise=false"] = "the network has no depthwise 3D convolutions"
    is_for_it = no_gpu and str(trainer.precision).startswith("bf16")
    if perf.fast_depthwise and not is_for_it and has_depthwise(network):
        reasons["perf.fast_depthwise=true"] = "it is for bf16 on a CPU"
    if perf.activation_checkpointing == "pointwise" and perf.compile:
        setting = "perf.activation_checkpointing=pointwise"
        reasons[setting] = "the compiler itself chooses what to recompute"
    if trainer.limit_test_batches is not None and not config.test:
        reasons["trainer.limit_test_batches"] = "a run tests with test=true only"
    if trainer.limit_predict_batches is not None:
        reasons["trainer.limit_predict_batches"] = "a run predicts nothing"
    if trainer.sync_batchnorm and not no_gpu and trainer.devices == 1 and trainer.num_nodes in (None, 1):
        reasons["trainer.sync_batchnorm=true"] = "one device has all samples of a batch"
    if trainer.model_registry is not None:
        reasons["trainer.model_registry"] = "checkpoints are files"
    if config.data.num_workers == 0 and config.data.prefetch_factor != DataConfig.prefetch_factor:
        reasons["data.prefetch_factor"] = "data.num_workers=0 loads each batch when it is needed"
    if not config.derived.per_voxel:
        for key in ("overlap", "sw_batch_size"):
            if getattr(config.task, key) != getattr(TaskConfig, key):
                reasons[f"task.{key}"] = "the network takes whole images, not windows of them"
    return [f"{setting} has no effect: {reason}" for setting, reason in reasons.items()]


def log_start_texts(trainer: Trainer, config: RunConfig, plan: Plan) -> None:
    """The config, and the plan with its reasons, in TensorBoard's TEXT page."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.log_text("config", to_yaml(config.plain()))
            if plan.rows:
                logger.log_text("plan", table(plan.rows))


def log_hyperparameters(trainer: Trainer, config: RunConfig, folder: RunDir) -> None:
    """TensorBoard's HPARAMS page: hyperparameters with the best score; other loggers: hyperparameters.

    A sweep's job logs only its own overrides, since the page shows only the first few in alphabetical order.
    """
    if not getattr(config.trainer, "enable_autolog_hparams", True):
        return
    groups = ("data", "model", "conv", "optimizer", "scheduler", "perf", "seed")
    content = {group: node for group, node in config.plain().items() if group in groups}
    params = {key: _loggable(value) for key, value in configs.flatten(content).items()}
    overrides = json.loads(os.environ.get(HPARAMS) or "{}")
    overrides = {key: _number(value) for key, value in overrides.items()}
    monitored = metric_of_summary(folder.summary())
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.log_hparams_page(overrides or params, monitored.best_name)
        else:
            logger.log_hyperparams(params)


def _loggable(value: Any) -> int | float | str:
    """Loggers take no lists and no null."""
    return value if isinstance(value, (int, float, str, bool)) else str(value)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
