"""medconv/training/optim/muon.py: against its definition, matrix by matrix and in batches."""

import pytest
import torch

from medconv.training.optim import muon
from medconv.training.optim.muon import orthogonal


def directions(matrix):
    """U V^T of the singular value decomposition: `orthogonal` approximates it."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


@pytest.mark.parametrize("shape", [(8, 200), (200, 8), (64, 64), (1, 9), (3, 1)])
def test_orthogonal_evens_out_singular_values_and_keeps_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (result,) = orthogonal([matrix])
    values = torch.linalg.svdvals(result.double())
    assert result.shape == matrix.shape
    if shape != (64, 64):  # its smallest singular value is near 0
        assert values.min() > 0.6 and values.max() < 1.3
    aligned = (result.double() * directions(matrix)).sum() / min(shape)
    assert aligned > 0.6


def by_definition(matrix):
    """The definition: five steps on the matrix itself."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-3), (True, 0.1)])
def test_orthogonal_is_newton_schulz_of_each_matrix(bf16, tolerance, monkeypatch):
    """Also of singular values over four decades, as momenta have them; the update's size is kept."""
    monkeypatch.setattr(muon, "fast_bf16_cpu", lambda: bf16)
    generator = torch.Generator().manual_seed(0)
    matrices = []
    for shape, decades in [((128, 500), 0), ((128, 1728), 2), ((128, 900), 4), ((600, 128), 3)]:
        u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
        matrices.append(1e-3 * u * 10 ** -torch.linspace(0, decades, 128) @ v)
    before = torch.get_float32_matmul_precision()
    for result, matrix in zip(orthogonal(matrices), matrices, strict=True):
        expected = by_definition(matrix)
        assert (result.double() - expected).norm() < tolerance * expected.norm()
        assert result.double().norm() == pytest.approx(float(expected.norm()), rel=0.01)
    assert torch.get_float32_matmul_precision() == before


def test_orthogonal_ignores_the_scale():
    matrix = torch.randn(6, 40)
    torch.testing.assert_close(orthogonal([1e4 * matrix]), orthogonal([matrix]), atol=0.02, rtol=0.05)
    assert orthogonal([torch.zeros(3, 9)])[0].abs().max() == 0


@pytest.mark.parametrize("bf16", [False, True])
def test_batches_and_rows_of_zeros_change_rounding_alone(bf16, monkeypatch):
    """Two of one shape, a tall one, one with fewer rows, a square."""
    monkeypatch.setattr(muon, "fast_bf16_cpu", lambda: bf16)
    monkeypatch.setattr(muon, "_SMALLEST_BF16", 1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 90), (27, 32), (32, 90), (90, 32), (3, 9), (32, 32)]
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    together = orthogonal(matrices, batched=True)
    for result, other, matrix in zip(together, orthogonal(matrices), matrices, strict=True):
        (alone,) = orthogonal([matrix])
        tolerance = 0.02 if bf16 else 1e-4
        assert result.shape == matrix.shape
        assert (result - alone).norm() < tolerance * alone.norm()
        assert (other - alone).norm() < tolerance * alone.norm()
