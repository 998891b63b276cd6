"""Muon for convolutional networks: orthogonalised momentum for kernels, Adam for everything else."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from medconv.utils.hardware import fast_bf16_cpu, fast_bf16_gpu, read_at_once

# The learning rate of runs of up to _SHORT_RUN steps; longer ones take less, down to _MIN_FACTOR of it.
_LR = 2e-2
_SHORT_RUN = 600
_MIN_FACTOR = 0.25
# Usual size of Adam's update of a weight, in units of the learning rate.
_ADAMS_UPDATE = 0.2
_FEWEST_ROWS = 32  # kernels with smaller sides are handled together
_FEW_ROWS_ON_GPU = 128  # there, all up to it together, and all above
# Odd polynomial that, repeated five times, moves all singular values in (0, 1] toward 1: to 0.7 to 1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_SMALLEST_BF16 = 128  # rows; smaller matrices are faster in fp32 on a CPU


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
        entries = list(params)
        given = [{**entry, "params": list(entry["params"])} for entry in entries if isinstance(entry, dict)]
        groups = []  # each of kernels, or of parameters with fewer than three axes, alone
        for group in given or [{"params": entries}]:
            for kernels in (True, False):
                members = [p for p in group["params"] if (p.ndim > 2) == kernels]
                if members:
                    groups.append({**group, "params": members, "kernels": kernels})
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
        on_device = found_inf is not None and not read_at_once(found_inf)
        if found_inf is not None:
            if not on_device and found_inf:
                return
            is_taken = 1 - found_inf
            if on_device:
                # Finite gradients that leave the momentum as it is
                gradients = _either(found_inf.bool(), momenta, gradients)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        # Nesterov's look-ahead: the update is between gradient and momentum
        torch._foreach_lerp_(gradients, momenta, group["momentum"])
        # FSDP shards tensors over the ranks; sharding needs no communication, as each rank has all of it.
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        torch._foreach_mul_(kernels, 1 - is_taken * (group["lr"] * group["weight_decay"]))
        updates = _orthogonal_kernels(full)
        if on_device:
            torch._foreach_mul_(updates, is_taken)
        by_side: dict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for kernel, update in zip(kernels, updates, strict=True):
            if isinstance(kernel, DTensor):
                update = distribute_tensor(update, kernel.device_mesh, kernel.placements, src_data_rank=None)
            of_side = by_side[max(_sides(kernel))]
            of_side[0].append(kernel)
            of_side[1].append(update)
        for side, (moved, by) in by_side.items():
            # The weights of an orthogonal update have the RMS 1 / sqrt(larger side)
            torch._foreach_sub_(moved, by, alpha=group["lr"] * _ADAMS_UPDATE * side**0.5)

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


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _either(condition: Tensor, if_true: list[Tensor], if_false: list[Tensor]) -> list[Tensor]:
    """`torch.where` for lists of tensors with the same shapes and strides, without a launch for each.

    Args: condition: one value, on the device.
    """
    sizes = [tensor.numel() for tensor in if_true]
    flat = []
    for tensors in (if_true, if_false):
        flat.append(tensors[0].new_empty(sum(sizes)))
        torch._foreach_copy_(_parts(flat[-1], sizes, tensors), tensors)
    chosen = torch.where(condition, flat[0], flat[1])
    return _parts(chosen, sizes, if_true)


def _parts(flat: Tensor, sizes: list[int], like: list[Tensor]) -> list[Tensor]:
    """Views of parts of a flat tensor, each with the shape and strides of one of `like`."""
    pieces = zip(flat.split(sizes), like, strict=True)
    return [piece.as_strided(other.shape, other.stride()) for piece, other in pieces]


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
    """The factor of the learning rate for the length of a run; a run without a known end counts as long."""
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


def orthogonal(matrices: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
    """About the nearest matrices with orthonormal rows, or columns if tall: singular values 0.7 to 1.2.

    Newton-Schulz steps are taken on the small Gram matrices X X', of all X together, and X is multiplied by
    their product. In bf16, where the hardware is fast at it, there are new Gram matrices after three steps,
    before their rounding errors become negative eigenvalues, which grow. A matrix with a smaller side than
    others gets rows of zeros, which change nothing, but take time on a CPU.

    Shape: (rows, columns) each -> the same.
    Args: batched: multiply matrices of one shape at once: fewer launches on a GPU, slower on a CPU.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    rows = max(min(matrix.shape) for matrix in matrices)
    is_fast = fast_bf16_gpu() if matrices[0].is_cuda else rows >= _SMALLEST_BF16 and fast_bf16_cpu()
    dtype = torch.bfloat16 if is_fast else torch.float32
    precision = "medium" if is_fast else "highest"
    repetitions = (3, 2) if is_fast else (5,)
    wide = [matrix.mT if len(matrix) > matrix.shape[1] else matrix for matrix in matrices]
    order = list(range(len(matrices)))
    if batched:
        groups = _by_shape(wide)
        order = [index for group in groups for index in group]
        wide = [torch.stack([wide[index] for index in group]) for group in groups]
    # matrices (rows, columns), or batches of them
    wide = [_with_rows(matrix.to(dtype), rows) for matrix in wide]
    product_of = torch.bmm if batched else torch.mm  # `@` is five calls for batches
    with _matmul_precision(precision):
        for pass_index, steps in enumerate(repetitions):
            products = [product_of(matrix, matrix.mT) for matrix in wide]
            grams = torch.cat([product.view(-1, rows, rows) for product in products]).float()
            if pass_index == 0:
                # Frobenius norms, from the trace: singular values of matrices / norms are at most 1
                norms = grams.diagonal(dim1=1, dim2=2).sum(1).sqrt()[:, None, None] + 1e-7
                factors = _factors(grams / norms.square(), steps) / norms
            else:
                factors = _factors(grams, steps)
            shares = factors.to(dtype).split([product.numel() // rows**2 for product in products])
            wide = [
                product_of(share.view(product.shape), matrix)
                for share, product, matrix in zip(shares, products, wide, strict=True)
            ]
    results = list(matrices)
    if batched:  # one launch each, where the optimizer's would be one for each kernel
        wide = [batch.to(matrices[0].dtype) for batch in wide]
    orthogonals = [single for batch in wide for single in batch.view(-1, rows, batch.shape[-1])]
    for index, result in zip(order, orthogonals, strict=True):
        results[index] = _narrow(result, matrices[index])
    return results


def _by_shape(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices of matrices of one shape."""
    groups: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        groups[matrix.shape].append(index)
    return list(groups.values())


def _with_rows(wide: Tensor, rows: int) -> Tensor:
    """Matrices (..., rows, columns) with rows of zeros after theirs."""
    missing = rows - wide.shape[-2]
    return F.pad(wide, (0, 0, 0, missing)) if missing else wide


def _narrow(wide: Tensor, matrix: Tensor) -> Tensor:
    """A wide matrix, maybe with rows of zeros, in the shape of the matrix that it stands for."""
    result = wide[: min(matrix.shape)]
    return result.mT if len(matrix) > matrix.shape[1] else result


def _factors(grams: Tensor, repetitions: int) -> Tensor:
    """What repeated Newton-Schulz steps multiply matrices with from the left.

    Shape: (matrices, rows, rows), Gram matrices -> the same.
    """
    factor = _polynomial(grams)
    product = factor
    for _ in range(repetitions - 1):
        grams = torch.bmm(torch.bmm(factor, grams), factor)
        factor = _polynomial(grams)
        product = torch.bmm(factor, product)
    return product


def _polynomial(grams: Tensor) -> Tensor:
    """linear * I + cubic * G + quintic * G G of each Gram matrix G."""
    linear, cubic, quintic = _NEWTON_SCHULZ
    factor = torch.baddbmm(grams, grams, grams, beta=cubic, alpha=quintic)
    factor.diagonal(dim1=1, dim2=2).add_(linear)
    return factor


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """The precision of fp32 matrix products inside: `highest`, or `medium`, as fast as TF32 or bf16."""
    earlier = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(earlier)
