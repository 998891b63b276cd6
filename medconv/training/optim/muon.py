"""Muon for convolutional networks: orthogonalised momentum for kernels, Adam for everything else."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from medconv.utils.hardware import fast_bf16_cpu

# Odd polynomial that, repeated five times, moves all singular values in (0, 1] toward 1: to 0.7 to 1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# The learning rate of runs of up to _SHORT steps; longer ones take less, down to _LEAST of it.
_RATE, _SHORT, _LEAST = 2e-2, 600, 0.25
_SMALLEST_BF16 = 128  # smaller matrices are faster in fp32 on a CPU


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
        """Uses the gradients' memory: afterwards they are no gradients any more."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            together: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    count = self._begin(parameter, group["kernels"])
                    size = min(_sides(parameter)) if group["kernels"] else count
                    together[isinstance(parameter, DTensor), size].append(parameter)
            for members in together.values():
                (self._update_kernels if group["kernels"] else self._update_vectors)(members, group)
        return loss

    def _begin(self, parameter: Tensor, kernel: bool) -> int:
        """Makes the state of a parameter's first step. Returns how many steps it has taken."""
        state = self.state[parameter]
        if not state and kernel:
            state["momentum"] = torch.zeros_like(parameter)
        elif not state:
            state.update(mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter), step=0)
        return int(state.get("step", 0))

    def _update_kernels(self, kernels: list[Tensor], group: dict[str, Any]) -> None:
        """Args: kernels: with equal smaller sides, whose Gram matrices are multiplied together."""
        momenta, gradients = [self.state[k]["momentum"] for k in kernels], _gradients(kernels)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        taken: Any = 1.0
        if found_inf is not None:  # finite gradients that leave the momentum as it is
            gradients = [torch.where(found_inf.bool(), m, g) for m, g in zip(momenta, gradients, strict=True)]
            taken = 1 - found_inf
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, momenta, group["momentum"])
        # FSDP shards tensors over the ranks; sharding needs no communication, as each rank has all of it.
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        torch._foreach_mul_(kernels, 1 - taken * (group["lr"] * group["weight_decay"]))
        for kernel, update in zip(kernels, _orthogonal_kernels(whole), strict=True):
            if isinstance(kernel, DTensor):
                update = distribute_tensor(update, kernel.device_mesh, kernel.placements, src_data_rank=None)
            if found_inf is not None:
                update.mul_(taken)
            kernel.sub_(update, alpha=group["lr"] * 0.2 * max(_sides(kernel)) ** 0.5)

    def _update_vectors(self, vectors: list[Tensor], group: dict[str, Any]) -> None:
        """Args: vectors: that have taken equally many steps."""
        states = [self.state[v] for v in vectors]
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


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _sides(kernel: Tensor) -> tuple[int, int]:
    """Of a kernel as a matrix."""
    return len(kernel), kernel.shape[1:].numel()


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


def _orthogonal_kernels(kernels: list[Tensor]) -> list[Tensor]:
    """Orthogonalises kernels as matrices (out, in * taps), columns in memory order to avoid a copy."""
    orders = [[0, *sorted(range(1, k.ndim), key=k.stride, reverse=True)] for k in kernels]
    laid = [k.permute(order) for k, order in zip(kernels, orders, strict=True)]
    results = orthogonal([k.flatten(1) for k in laid])
    return [
        result.view(k.shape).permute([order.index(axis) for axis in range(k.ndim)])
        for result, k, order in zip(results, laid, orders, strict=True)
    ]


def orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """About the nearest matrices with orthonormal rows, or columns if tall: singular values 0.7 to 1.2.

    Newton-Schulz steps are taken on the small Gram matrices X X', of all X together, and X is multiplied by
    their product. In bf16, where the hardware is fast at it, there are new Gram matrices after three steps,
    before their rounding errors become negative eigenvalues, which grow.
    Shape: (rows, columns) each, all with the same smaller side -> the same.
    """
    fast = matrices[0].is_cuda or (min(matrices[0].shape) >= _SMALLEST_BF16 and fast_bf16_cpu())
    wide = [m.mT if len(m) > m.shape[1] else m for m in matrices]
    wide = [m.to(torch.bfloat16 if fast else torch.float32) for m in wide]
    norms: Tensor | None = None
    with _matmul_precision("medium" if fast else "highest"):
        for repetitions in (3, 2) if fast else (5,):
            grams = torch.stack([m @ m.mT for m in wide]).float()
            if norms is None:
                norms = grams.diagonal(dim1=1, dim2=2).sum(1).sqrt()[:, None, None] + 1e-7
                factors = _factors(grams / norms.square(), repetitions) / norms
            else:
                factors = _factors(grams, repetitions)
            wide = [f @ m for f, m in zip(factors.to(wide[0].dtype), wide, strict=True)]
    return [x.mT if len(m) > m.shape[1] else x for x, m in zip(wide, matrices, strict=True)]


def _factors(grams: Tensor, repetitions: int) -> Tensor:
    """What repeated Newton-Schulz steps multiply matrices with from the left.

    Shape: (matrices, rows, rows), Gram matrices -> the same.
    """
    linear, cubic, quintic = _NEWTON_SCHULZ
    product = factor = torch.empty(0)
    for repetition in range(repetitions):
        grams = factor @ grams @ factor if repetition else grams
        factor = torch.baddbmm(grams, grams, grams, beta=cubic, alpha=quintic)
        factor.diagonal(dim1=1, dim2=2).add_(linear)
        product = factor @ product if repetition else factor
    return product


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Of fp32 matrix products: `highest`, or `medium`, as fast as TF32 or bf16 with sums in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
