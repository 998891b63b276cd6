"""medconv/targets/masking.py: labelled voxels in one row, and losses that take a mask."""

import torch
from torch import nn

from medconv.targets.masking import labelled_row, over_voxels, takes_mask


def test_labelled_voxels_keep_their_order_and_channels() -> None:
    values = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    labelled = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    row = labelled_row(values, labelled)
    assert row.shape == (1, 3, int(labelled.sum()), 1)
    expected = [values[b, :, y, x] for b, _, y, x in labelled.nonzero().tolist()]
    assert torch.equal(row[0, :, :, 0], torch.stack(expected, 1))


def test_flags_of_outputs_have_one_value_for_all_voxels() -> None:
    flags = torch.tensor([[True, False]])
    assert over_voxels(flags, torch.zeros(1, 2, 3, 4, 5)).shape == (1, 2, 1, 1, 1)


def test_a_loss_tells_by_its_arguments_whether_it_takes_a_mask() -> None:
    class Masked(nn.Module):
        def forward(self, outputs: torch.Tensor, reference: torch.Tensor, labelled: torch.Tensor) -> None: ...

    assert takes_mask(Masked()) and takes_mask(lambda a, b, labelled: a)
    assert not takes_mask(nn.CrossEntropyLoss()) and not takes_mask(lambda a, b: a)
