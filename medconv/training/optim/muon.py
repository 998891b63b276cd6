"""Muon for convolutional networks: orthogonalised momentum for kernels, Adam for everything else."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from medconv.utils.hardware import fast_bf16_cpu

# Odd polynomial that, repeated, moves all singular values in (0, 1] toward 1: to 0.7 to 1.2 after five times.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_REPETITIONS = 5
# The learning rate of runs of up to _SHORT steps; longer ones take less, down to _LEAST of it.
_RATE, _SHORT, _LEAST = 2e-2, 600, 0.25


class Muon(Optimizer):
    """A kernel (out, in, *taps) is a matrix (out, in * taps); its update has all singular values near 1.

    So a step changes all directions of a kernel equally, while plain gradients mainly change a few strong
    ones. A transposed convolution's kernel is (in, out, *taps), so its matrix is (in, out * taps). Parameters
    with fewer than three axes (biases, norms) use Adam.
    Args:
        params: parameters, or groups of them as in torch's optimizers.
        lr: for both; a kernel's update is scaled to the usual size of Adam's, 0.2 per weight. None: one for
            the length of the run, which a `ProgressSchedule` tells.
        momentum: Nesterov momentum of kernels. betas, eps: of Adam.
        weight_decay: decoupled, for kernels only.
    If the attribute `found_inf`, a tensor on the device, is 1, a step changes only the step count, without
    synchronising with the host. `found_inf` does not work with parameters sharded by FSDP.
    Raises: ValueError: an argument is not a number, or out of range.
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
        _check({"lr": _RATE if lr is None else lr, "weight_decay": weight_decay, "eps": eps})
        _check({"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}, below_one=True)
        entries: list[Any] = list(params)
        groups = [{**g, "params": list(g["params"])} for g in entries if isinstance(g, dict)]
        groups = groups or [{"params": entries}]
        self.heeds_found_inf = not any(isinstance(p, DTensor) for group in groups for p in group["params"])
        divided = [
            {**group, "params": members, "kernels": kernels}
            for group in groups
            for kernels in (True, False)
            if (members := [p for p in group["params"] if (p.ndim > 2) == kernels])
        ]
        self.lr_factor = length_factor if lr is None else None
        settings = {
            "lr": _RATE if lr is None else lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(divided, {**settings, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, found_inf = self.state[parameter], getattr(self, "found_inf", None)
        if not state:
            for name in ["momentum"] if group["kernels"] else ["mean", "square"]:
                state[name] = torch.zeros_like(parameter)
            if not group["kernels"]:
                state["step"] = 0
        changed: list[Tensor] = []
        if found_inf is not None:
            changed = [parameter, *(value for value in state.values() if isinstance(value, Tensor))]
        before = [tensor.clone() for tensor in changed]
        (self._kernel if group["kernels"] else self._vector)(parameter, gradient, group)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(found_inf.bool(), old, tensor))  # type: ignore[union-attr]

    def _kernel(self, kernel: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[kernel]
        momentum = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"])
        # FSDP shards tensors over the ranks; sharding needs no communication, as each rank has all of it.
        update = _orthogonal_kernel(ahead.full_tensor() if isinstance(ahead, DTensor) else ahead)
        if isinstance(kernel, DTensor):
            update = distribute_tensor(update, kernel.device_mesh, kernel.placements, src_data_rank=None)
        size = 0.2 * max(len(kernel), kernel.shape[1:].numel()) ** 0.5
        kernel.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] * size)

    def _vector(self, vector: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[vector]
        state["step"] += 1
        first, second = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - first) / (1 - first ** state["step"])
        square = state["square"].lerp_(gradient.square(), 1 - second) / (1 - second ** state["step"])
        vector.addcdiv_(mean, square.sqrt_().add_(group["eps"]), value=-group["lr"])


def length_factor(total_steps: float) -> float:
    """Of the learning rate, for the length of a run; of a run without a known end as for a long one."""
    return max(_LEAST, min(1.0, math.sqrt(_SHORT / max(1.0, total_steps))))


def _check(settings: dict[str, Any], below_one: bool = False) -> None:
    for name, value in settings.items():
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, got {value}")
        if below_one and not 0 <= value < 1:
            raise ValueError(f"{name} must lie between 0 and 1 (exclusive), got {value}")
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")


def _orthogonal_kernel(kernel: Tensor) -> Tensor:
    """Orthogonalises a kernel as a matrix (out, in * taps), columns in memory order to avoid a copy."""
    order = [0, *sorted(range(1, kernel.ndim), key=kernel.stride, reverse=True)]
    laid = kernel.permute(order)
    back = [order.index(axis) for axis in range(kernel.ndim)]
    return orthogonal(laid.flatten(1)).view(laid.shape).permute(back)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthonormal rows, or columns if it is tall: singular values 0.7 to 1.2.

    Shape: (rows, columns) -> the same. Computed in bf16 where the hardware is fast at it.
    """
    fast = matrix.is_cuda or fast_bf16_cpu()
    x = matrix.to(torch.bfloat16) if fast else matrix.float()
    x = x.T if len(x) > x.shape[1] else x  # fewer rows make `x @ x.T` cheaper
    x = x / (x.norm() + 1e-7)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(_REPETITIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix.dtype)
