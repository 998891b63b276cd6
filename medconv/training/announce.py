"""What the log says of a run before it trains."""

import logging

import lightning as L
from torch import nn

from medconv.config import PerfConfig, RunConfig, TrainerConfig
from medconv.models.layers.depthwise import has_depthwise
from medconv.models.layers.fast_norm import SWAPPED
from medconv.training.data_setup import PreparedData
from medconv.training.distributed import batch_size_per_process, has_parts
from medconv.training.run_dir import RunDir
from medconv.training.task import Task
from medconv.utils.hardware import triton_missing, uses_gpu
from medconv.utils.logging import size_text

log = logging.getLogger(__name__)


def announce(
    config: RunConfig, prepared: PreparedData, task: Task, trainer: L.Trainer, folder: RunDir
) -> None:
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
        "patch: %s voxels of %s mm, global batch %d",
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
    for line in without_effect(config.perf, config.trainer, network, test=config.test):
        log.warning("%s", line)
    has_fast_norms = any(isinstance(layer, SWAPPED) for layer in network.modules())
    if config.perf.fast_norm and has_fast_norms and uses_gpu(config.trainer.accelerator):
        missing = triton_missing()
        if missing is not None:
            log.warning("perf.fast_norm=true: norms are several times slower than they could be: %s", missing)


def without_effect(
    perf: PerfConfig, trainer: TrainerConfig, network: nn.Module, *, test: bool = False
) -> list[str]:
    """One line for each setting that is on but has no effect here, with the reason."""
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
    if trainer.limit_test_batches is not None and not test:
        reasons["trainer.limit_test_batches"] = "a run tests with test=true only"
    if trainer.limit_predict_batches is not None:
        reasons["trainer.limit_predict_batches"] = "a run predicts nothing"
    if trainer.model_registry is not None:
        reasons["trainer.model_registry"] = "checkpoints are files"
    return [f"{setting} has no effect: {reason}" for setting, reason in reasons.items()]
