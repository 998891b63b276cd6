"""Several devices: DDP without needless traffic, FSDP2, and Lightning's per-batch broadcasts thinned out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed, nn

from medconv.utils import cluster
from medconv.utils.hardware import uses_gpu

log = logging.getLogger(__name__)


def strategy(trainer: Mapping[str, Any], perf: Mapping[str, Any], accumulates: bool = False) -> Any:
    """Lightning's strategy for `trainer.strategy`; what is not `auto`, `ddp` or `fsdp` goes to Lightning as
    it is.

    DDP's gradients are views of its buckets (no copy, and their memory once); buffers are not broadcast in
    every forward, see `BroadcastBuffers`; the graph is static unless gradients are accumulated.
    Args: accumulates: gradients, by a callback.
    Raises: ValueError: `fsdp` with `perf.activation_checkpointing=pointwise`; `perf.timeout_seconds` is not
    positive.
    """
    wanted, timeout = trainer["strategy"], cluster.timeout(perf)
    processes = _devices(trainer) * trainer["num_nodes"]
    if wanted == "fsdp" and perf["activation_checkpointing"] == "pointwise":
        raise ValueError(
            "perf.activation_checkpointing=pointwise computes norms again from weights that "
            "trainer.strategy=fsdp has freed by then; take perf.activation_checkpointing=blocks"
        )
    if wanted == "fsdp":  # `auto` sizes would mean tensor parallelism within a node
        return ModelParallelStrategy(
            processes, tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=timeout
        )
    if wanted == "ddp" or (wanted == "auto" and processes > 1):
        static = trainer["accumulate_grad_batches"] == 1 and not accumulates and not perf["compile"]
        known = signature(nn.parallel.DistributedDataParallel.__init__).parameters
        buffers = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # until torch 2.12
        quiet: dict[str, Any] = {buffers: False}
        return DDPStrategy(gradient_as_bucket_view=True, static_graph=static, timeout=timeout, **quiet)
    return wanted


def shard(network: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2, in place: parameters, gradients and optimizer states divided over the ranks, block by block.

    Args: mesh: the data-parallel device mesh.
    """
    from torch.distributed.fsdp import fully_shard

    for parameter in (
        network.parameters()
    ):  # it takes no channels-last weights; the library brings them into its own layout
        parameter.data = parameter.data.contiguous()
    for child in network.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


class BroadcastBuffers(Callback):
    """Running statistics of rank 0 on every rank before they are used: DDP would broadcast them in every
    forward.

    After the weights' averages, if there are some, have taken their place for the validation.
    """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            for buffer in pl_module.buffers():
                distributed.broadcast(buffer, src=0)


class UnshardForValidation(Callback):
    """Under FSDP2 every rank holds the whole network while it validates.

    A forward pass gathers the weights of all ranks, and they have different numbers of validation cases.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in _sharded(pl_module):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in _sharded(pl_module):
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


class StopSync:
    """What any rank was told, and what rank 0 wants, become known to all ranks at the same batch, every few
    batches.

    Lightning broadcasts and waits for the device in every batch, and its signal handler broadcasts while the
    other ranks may be in another collective. `device` is this rank's; None for a single process, which asks
    nobody.
    Args: every: batches.
    Raises: ValueError: every is less than 1.
    """

    device: torch.device | None = None

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"perf.stop_sync_interval must be at least 1, got {every}")
        self._every, self._batch = every, 0

    def agree(self, number: int, due: bool) -> tuple[int, bool]:
        """Called once per batch on all ranks; between agreements nothing is asked for.

        Args: number: of the signal that this rank was sent, or 0. due: whether, by its clock, it is time to
        act.
        Returns: the largest number of any rank, and whether rank 0 says that it is time.
        """
        self._batch += 1
        if self.device is not None and self._batch % self._every:
            return 0, False
        return self.now(number, due)

    def now(self, number: int, due: bool) -> tuple[int, bool]:
        """The same, at once."""
        if self.device is None:
            return number, due
        said = torch.tensor([number, int(due and distributed.get_rank() == 0)], device=self.device)
        distributed.all_reduce(said, op=distributed.ReduceOp.MAX)
        return int(said[0]), bool(said[1])


def _sharded(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _devices(trainer: Mapping[str, Any]) -> int:
    """Processes per node that the config asks for, once `check_devices` has seen it."""
    devices = trainer["devices"]
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    return torch.cuda.device_count() if uses_gpu(trainer["accelerator"]) else 1
