"""Muon for convolutional networks: orthogonalised momentum for kernels, Adam for everything else."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from medconv.training.optim.newton_schulz import orthogonal

# The learning rate of runs of up to _SHORT_RUN steps; longer ones take less, down to _MIN_FACTOR of it.
_LR = 2e-2
_SHORT_RUN = 600
_MIN_FACTOR = 0.25
# Usual size of Adam's update of a weight, in units of the learning rate.
_ADAMS_UPDATE = 0.2
_FEWEST_ROWS = 32  # kernels with smaller sides are handled together
_FEW_ROWS_ON_GPU = 128  # there, all up to it together, and all above


class Muon(Optimizer):
    """A kernel (out, in, *taps) is a matrix (out, in * taps); its update has all singular values near 1.

    So a step changes all directions of a kernel equally, while plain gradients mainly change a few strong
    ones. A transposed convolution's kernel is (in, out, *taps), so its matrix is (in, out * taps). Parameters
    with fewer than three axes (biases, norms) use Adam.

    If the attribute `found_inf`, a tensor on the device, is 1, a step changes only the step count, without
    synchronising with the host. `found_inf` does not work with parameters sharded by FSDP.

    Args:
        params: parameters, or groups of them as in torch's optimizers.
        lr: for both; a kernel's update is scaled to the usual size of Adam's, 0.2 per weight. None: one for
            the length of the run, which a `ProgressSchedule` tells.
        momentum: Nesterov momentum of kernels.
        betas: of Adam.
        eps: of Adam.
        weight_decay: decoupled, for kernels only.
    Raises:
        ValueError: an argument is not a number, or out of range.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; scale of the update: Liu et al.
        2025, arXiv:2502.16982.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas}")
        initial_lr = _LR if lr is None else lr
        _check({"lr": initial_lr, "weight_decay": weight_decay, "eps": eps})
        _check({"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}, below_one=True)
        groups = _kernels_apart(params)
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        self.heeds_found_inf = not sharded
        self.lr_factor = length_factor if lr is None else None
        settings = {
            "lr": initial_lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(groups, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Uses the gradients' memory: afterwards they are no gradients any more."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["kernels"]:
                for kernels in self._kernels_by_size(group).values():
                    self._update_kernels(kernels, group)
            else:
                for vectors in self._vectors_by_steps(group).values():
                    self._update_vectors(vectors, group)
        return loss

    def _kernels_by_size(self, group: dict[str, Any]) -> dict[Any, list[Tensor]]:
        """Kernels with a gradient, those that are orthogonalised together in one list; sharded ones apart."""
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for kernel in group["params"]:
            if kernel.grad is not None:
                if not self.state[kernel]:
                    self.state[kernel]["momentum"] = torch.zeros_like(kernel)
                batches[isinstance(kernel, DTensor), _rows_together(kernel)].append(kernel)
        return batches

    def _vectors_by_steps(self, group: dict[str, Any]) -> dict[Any, list[Tensor]]:
        """Vectors with a gradient, those that have taken equally many steps together; sharded ones apart."""
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for vector in group["params"]:
            if vector.grad is not None:
                state = self.state[vector]
                if not state:
                    state["mean"] = torch.zeros_like(vector)
                    state["square"] = torch.zeros_like(vector)
                    state["step"] = 0
                batches[isinstance(vector, DTensor), int(state["step"])].append(vector)
        return batches

    def _update_kernels(self, kernels: list[Tensor], group: dict[str, Any]) -> None:
        """Args: kernels: whose Gram matrices are multiplied together."""
        momenta = [self.state[kernel]["momentum"] for kernel in kernels]
        gradients = _gradients(kernels)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        is_taken: Any = 1.0  # 0 if the step is skipped
        if found_inf is not None:
            is_taken = 1 - found_inf
            is_skipped = found_inf.bool()  # once: each call is a launch
            # Finite gradients that leave the momentum as it is
            gradients = [
                torch.where(is_skipped, momentum, gradient)
                for momentum, gradient in zip(momenta, gradients, strict=True)
            ]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        # Nesterov's look-ahead: the update is between gradient and momentum
        torch._foreach_lerp_(gradients, momenta, group["momentum"])
        # FSDP shards tensors over the ranks; sharding needs no communication, as each rank has all of it.
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        torch._foreach_mul_(kernels, 1 - is_taken * (group["lr"] * group["weight_decay"]))
        for kernel, update in zip(kernels, _orthogonal_kernels(full), strict=True):
            if isinstance(kernel, DTensor):
                update = distribute_tensor(update, kernel.device_mesh, kernel.placements, src_data_rank=None)
            if found_inf is not None:
                update.mul_(is_taken)
            # The weights of an orthogonal update have the RMS 1 / sqrt(larger side)
            kernel.sub_(update, alpha=group["lr"] * _ADAMS_UPDATE * max(_sides(kernel)) ** 0.5)

    def _update_vectors(self, vectors: list[Tensor], group: dict[str, Any]) -> None:
        """Args: vectors: that have taken equally many steps."""
        states = [self.state[vector] for vector in vectors]
        for state in states:
            state["step"] += 1
        count = torch.full((), float(states[0]["step"]), device=vectors[0].device)
        torch._fused_adam_(
            vectors,
            _gradients(vectors),
            [state["mean"] for state in states],
            [state["square"] for state in states],
            [],
            [count] * len(vectors),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=getattr(self, "found_inf", None),
        )


def _kernels_apart(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups, each of kernels or of parameters with fewer than three axes alone.

    Args:
        params: parameters, or groups of them.
    """
    entries = list(params)
    groups = [{**entry, "params": list(entry["params"])} for entry in entries if isinstance(entry, dict)]
    if not groups:
        groups = [{"params": entries}]
    divided = []
    for group in groups:
        for kernels in (True, False):
            members = [p for p in group["params"] if (p.ndim > 2) == kernels]
            if members:
                divided.append({**group, "params": members, "kernels": kernels})
    return divided


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _sides(kernel: Tensor) -> tuple[int, int]:
    """Rows and columns of a kernel as a matrix."""
    return len(kernel), kernel.shape[1:].numel()


def _rows_together(kernel: Tensor) -> int:
    """Equal for kernels that are orthogonalised together, padded to the largest of them.

    On a GPU a launch costs more than the products of zeros. Sharded kernels, gathered here, stay fewer.
    """
    rows = min(_sides(kernel))
    if kernel.device.type == "cpu" or isinstance(kernel, DTensor):
        return max(_FEWEST_ROWS, rows)
    return int(rows > _FEW_ROWS_ON_GPU)


def length_factor(total_steps: float) -> float:
    """Of the learning rate, for the length of a run; of a run without a known end as for a long one."""
    return max(_MIN_FACTOR, min(1.0, math.sqrt(_SHORT_RUN / max(1.0, total_steps))))


def _check(settings: dict[str, Any], below_one: bool = False) -> None:
    for name, value in settings.items():
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, got {value}")
        if below_one and not 0 <= value < 1:
            raise ValueError(f"{name} must lie between 0 and 1 (exclusive), got {value}")
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")


def _orthogonal_kernels(kernels: list[Tensor]) -> list[Tensor]:
    """Orthogonalises kernels as matrices (out, in * taps), columns in memory order to avoid a copy."""
    orders = []  # of the axes, by falling stride
    in_memory_order = []
    for kernel in kernels:
        order = [0, *sorted(range(1, kernel.ndim), key=kernel.stride, reverse=True)]
        orders.append(order)
        in_memory_order.append(kernel.permute(order))
    on_cpu = kernels[0].device.type == "cpu"
    matrices = orthogonal([kernel.flatten(1) for kernel in in_memory_order], batched=not on_cpu)
    updates = []
    for matrix, kernel, order in zip(matrices, in_memory_order, orders, strict=True):
        inverse_order = [order.index(axis) for axis in range(kernel.ndim)]
        updates.append(matrix.view(kernel.shape).permute(inverse_order))
    return updates
