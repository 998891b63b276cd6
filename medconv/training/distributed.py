"""Training on several devices: DDP and FSDP2, what the ranks agree on, and jobs that Slurm starts."""

import logging
import math
import os
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import distributed, nn

from medconv.config import ConfigError, PerfConfig, RunConfig, TrainerConfig
from medconv.utils import cluster
from medconv.utils.hardware import uses_gpu
from medconv.utils.signals import RunInterrupted, StopRequest

log = logging.getLogger(__name__)
_FINDS_UNUSED = "ddp_find_unused_parameters_true"  # Lightning's word, which torch's error leads to


def strategy_of(trainer: TrainerConfig, perf: PerfConfig, accumulates: bool = False) -> Strategy | None:
    """Lightning's strategy for `auto` with several devices, `ddp` and `fsdp`; None: any other one.

    `ddp_find_unused_parameters_true` is for networks of which some parameters take no part in a step.

    Args:
        trainer: of the config; `check_devices` has checked its devices.
        perf: of the config.
        accumulates: whether a callback accumulates gradients.
    Raises:
        ValueError: `fsdp` with `perf.activation_checkpointing=pointwise`.
    """
    timeout = timedelta(seconds=perf.timeout_seconds)
    num_processes = processes(trainer)
    if trainer.strategy == "fsdp":
        if trainer.sync_batchnorm:
            raise ValueError("trainer.sync_batchnorm=true has no effect with trainer.strategy=fsdp; take ddp")
        if perf.activation_checkpointing == "pointwise":
            raise ValueError(
                "perf.activation_checkpointing=pointwise recomputes norms from weights that "
                "trainer.strategy=fsdp has freed by then; use perf.activation_checkpointing=blocks"
            )
        return ModelParallelStrategy(
            num_processes,
            # `auto` sizes would mean tensor parallelism within a node
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=timeout,
        )
    if trainer.strategy == _FINDS_UNUSED:
        return _ddp(timeout, find_unused_parameters=True)
    if trainer.strategy == "ddp" or (trainer.strategy == "auto" and num_processes > 1):
        graph_is_static = trainer.accumulate_grad_batches == 1 and not accumulates and not perf.compile
        return _ddp(timeout, static_graph=graph_is_static)
    return None


def _ddp(timeout: timedelta, **settings: Any) -> DDPStrategy:
    """DDP without needless traffic.

    Gradients are views of its buckets, which saves a copy. Buffers are not broadcast in every forward, see
    `BroadcastBuffers`.
    """
    arguments = signature(nn.parallel.DistributedDataParallel.__init__).parameters
    # Torch 2.12 renamed the argument
    name = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
    no_broadcast: dict[str, Any] = {name: False}
    return DDPStrategy(gradient_as_bucket_view=True, timeout=timeout, **settings, **no_broadcast)


def shard(network: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2, in place: parameters, gradients and optimizer states are sharded over the ranks, per block.

    Args:
        network: each of its children is a block, or a list of blocks.
        mesh: the data-parallel device mesh.
    """
    from torch.distributed.fsdp import fully_shard

    for parameter in network.parameters():
        # FSDP2 refuses channels-last weights
        parameter.data = parameter.data.contiguous()
    for child in network.children():
        blocks = child if isinstance(child, nn.ModuleList) else [child]
        for block in blocks:
            has_parameters = any(True for _ in block.parameters())
            if has_parameters:
                fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


class BroadcastBuffers(Callback):
    """Broadcasts rank 0's buffers (batch norm statistics) before each validation, not in every forward.

    This callback comes after weight averaging, which sets the weights for the validation.
    """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        if distributed.get_world_size() == 1:
            return
        for buffer in pl_module.buffers():
            # NCCL refuses tensors in other layouts; this may be the buffer itself
            contiguous = buffer.contiguous()
            distributed.broadcast(contiguous, src=0)
            buffer.copy_(contiguous)


class UnshardForValidation(Callback):
    """Under FSDP2 every rank holds the full network during validation.

    Otherwise each forward pass would gather weights from all ranks, but ranks validate different numbers of
    cases.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in _sharded(pl_module):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in _sharded(pl_module):
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)

    on_test_start = on_validation_start
    on_test_epoch_end = on_validation_epoch_end


class StopSync(Callback):
    """Stops all ranks at the same batch: shares any rank's stop signal, and rank 0's wish to save.

    Lightning broadcasts and waits for the device in every batch, and its signal handler broadcasts while
    other ranks may be in another collective. A validation is aborted too, and repeated by the resumed run:
    its loaders end early (`DataModule`), then all ranks stop before results are gathered.

    Args:
        request: of this process.
        every: batches between two synchronisations.
    """

    def __init__(self, request: StopRequest, every: int) -> None:
        self._request = request
        self._every = every
        self._batch = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._request.defer()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal, _ = self._communicate(trainer, due=False)
        if signal:
            raise RunInterrupted(signal, agreed=True)

    def agree(self, trainer: Trainer, due: bool) -> tuple[int, bool]:
        """Called once per batch on all ranks; communicates every few batches, a single process in each.

        Args:
            due: whether a checkpoint is due by this rank's clock.
        Returns:
            The largest signal number of any rank, or 0; whether a checkpoint is due on rank 0.
        """
        self._batch += 1
        if trainer.world_size > 1 and self._batch % self._every:
            return 0, False
        return self._communicate(trainer, due)

    def _communicate(self, trainer: Trainer, due: bool) -> tuple[int, bool]:
        if trainer.world_size == 1:
            return self._request.number, due
        due_by_rank_zero = int(due and trainer.is_global_zero)
        state = torch.tensor([self._request.number, due_by_rank_zero], device=trainer.strategy.root_device)
        distributed.all_reduce(state, op=distributed.ReduceOp.MAX)
        return int(state[0]), bool(state[1])


def _sharded(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def processes(trainer: TrainerConfig) -> int:
    """Processes of a run, from a config that `check_devices` has checked."""
    devices = cluster.device_count(trainer.devices)
    if devices is None:
        devices = torch.cuda.device_count() if uses_gpu(trainer.accelerator) else 1
    return devices * (trainer.num_nodes or 1)


def of_all_ranks(value: Any) -> list[Any]:
    """The plain value of each rank, by rank; without other processes the value alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def batch_size_per_process(config: RunConfig) -> int:
    """Samples of a batch on each process, of a config with its `data.batch_size`.

    Raises:
        ConfigError: the global batch cannot be divided among the processes.
    """
    batch_size = config.data.batch_size or 1
    num_processes = processes(config.trainer)
    global_batch_size = config.data.global_batch_size or batch_size * num_processes
    if global_batch_size % num_processes:
        divisors = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
        raise ConfigError(
            f"data.global_batch_size={global_batch_size} cannot be divided among {num_processes} processes, "
            f"but among {', '.join(map(str, divisors))}; a run that resumes keeps its global batch"
        )
    return global_batch_size // num_processes


def samples_per_epoch(config: RunConfig) -> int:
    """`data.samples_per_epoch`, up to whole optimizer steps.

    Lightning steps at the end of an epoch, on as few batches as are left, whose gradients are smaller.
    """
    step = _global_batch_size(config) * config.trainer.accumulate_grad_batches
    return math.ceil((config.data.samples_per_epoch or 1) / step) * step


def batches_per_epoch(config: RunConfig) -> int:
    """Global batches of an epoch, as Lightning counts them, of a config with its `data.samples_per_epoch`."""
    batches = samples_per_epoch(config) // _global_batch_size(config)
    limit = config.trainer.limit_train_batches  # a whole number of batches, or a share of them
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _global_batch_size(config: RunConfig) -> int:
    return batch_size_per_process(config) * processes(config.trainer)


def has_parts(config: RunConfig) -> bool:
    """Whether a process computes its batch in parts of `data.batch_size` samples, with one loss over all.

    Gradients of the parts are not accumulated as by `trainer.accumulate_grad_batches`, whose loss is that of
    each part: see `compute_in_parts`.

    Raises:
        ConfigError: the global batch cannot be divided, or this network cannot be computed in parts.
    """
    if batch_size_per_process(config) <= (config.data.batch_size or 1):
        return False
    perf = config.perf
    if perf.cuda_graphs or perf.activation_checkpointing == "pointwise":
        setting = "cuda_graphs=true" if perf.cuda_graphs else "activation_checkpointing=pointwise"
        raise ConfigError(
            f"perf.{setting} does not compute a batch in parts, but data.global_batch_size="
            f"{config.data.global_batch_size} on {processes(config.trainer)} processes needs parts of "
            f"data.batch_size={config.data.batch_size}"
        )
    return True


def batches_per_step(config: RunConfig, batch_size: int) -> float:
    """What an optimizer step takes, in training steps of one batch of the plan's size on one process.

    Of a batch in parts, all but the last are computed again before their gradients: a third of a step more.
    """
    parts = 1.0
    if config.data.global_batch_size is not None:
        of_process = config.data.global_batch_size / processes(config.trainer)
        parts = max(1.0, of_process / batch_size)
    return config.trainer.accumulate_grad_batches * (parts + (parts - 1) / 3)


class ResumeStepCheck(Callback):
    """Checks that all processes resume at the same step: if they do not share the run folder, only some find
    a checkpoint.
    """

    def __init__(self) -> None:
        self._step = 0

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._step = checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the sanity check, which only new runs do."""
        step: Any = self._step
        if step == 0 and trainer.ckpt_path is not None:
            step = "of a checkpoint"  # which FSDP loads later
        steps = of_all_ranks(step)
        if len(set(steps)) > 1:
            raise ValueError(
                f"{trainer.default_root_dir}: not the same folder for all processes, they would resume at "
                f"steps {steps}; it must be on a file system that all machines share"
            )


def cluster_environment() -> ClusterEnvironment | None:
    """For Lightning's `plugins`; None: Lightning detects it correctly.

    In a batch script of several tasks, without srun, Lightning would wait for the other tasks.
    """
    started_by = cluster.launcher()
    if started_by is None:
        return LightningEnvironment() if "SLURM_NTASKS" in os.environ else None
    if started_by.name == cluster.SRUN:
        return SrunStep()
    return JobRanks(started_by.devices) if started_by.name == cluster.JOB else None


class JobRanks(TorchElasticEnvironment):
    """Reads RANK and WORLD_SIZE where torchrun has not set them; it sets LOCAL_RANK, too.

    Args: devices: processes per machine.
    """

    def __init__(self, devices: int) -> None:
        super().__init__()
        self._devices = devices

    def local_rank(self) -> int:
        return self.global_rank() % self._devices

    def node_rank(self) -> int:
        return self.global_rank() // self._devices


class SrunStep(SLURMEnvironment):
    """Reads srun's variables of this job step, not those of the whole job; does not handle signals."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(
            os.environ["SLURM_STEP_NODELIST"]
        )

    def world_size(self) -> int:
        return cluster.srun_tasks()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """`cluster.processes` has checked them."""

    @staticmethod
    def _validate_srun_used() -> None: ...

    @staticmethod
    def _validate_srun_variables() -> None: ...
