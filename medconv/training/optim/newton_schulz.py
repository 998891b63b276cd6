"""Newton-Schulz iterations on many matrices: about the nearest matrices with orthonormal rows."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from medconv.utils.hardware import fast_bf16_cpu

# Odd polynomial that, repeated five times, moves all singular values in (0, 1] toward 1: to 0.7 to 1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_SMALLEST_BF16 = 128  # rows; smaller matrices are faster in fp32 on a CPU


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
    is_fast = matrices[0].is_cuda or (rows >= _SMALLEST_BF16 and fast_bf16_cpu())
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
    """Of fp32 matrix products: `highest`, or `medium`, as fast as TF32 or bf16 with sums in fp32."""
    earlier = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(earlier)
