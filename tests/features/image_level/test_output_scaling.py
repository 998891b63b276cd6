"""medconv/features/image_level/output_scaling.py: outputs in physical units; everything else of the network stays."""

import copy

import torch
from torch import nn

from medconv.convs import fold_convs
from medconv.features.image_level.encoder import Encoder
from medconv.features.image_level.output_scaling import in_units
from medconv.performance.switches import apply_switches


def test_in_units_scales_the_outputs_and_changes_nothing_else():
    torch.manual_seed(0)
    plain = Encoder(2, 1, 2, [4, 8], [2]).eval()
    image, names = torch.randn(3, 1, 8, 8), list(plain.state_dict())
    with torch.no_grad():
        expected = plain(image) * torch.tensor([10.0, 2.0]) + torch.tensor([60.0, -1.0])
    network = in_units(copy.deepcopy(plain), [60.0, -1.0], [10.0, 2.0])
    assert (
        list(network.state_dict()) == names
        and isinstance(network, Encoder)
        and type(network).__name__ == "Encoder"
    )
    assert type(in_units(copy.deepcopy(plain), [0.0, 0.0], [1.0, 1.0])) is type(network)
    apply_switches(
        checkpointed := copy.deepcopy(network), channels_last=True, activation_checkpointing="pointwise"
    )
    traced = torch.jit.trace(network, image)
    copies = (copy.deepcopy(network), fold_convs(network), copy.deepcopy(checkpointed))
    for form in (network, *copies, traced):
        with torch.no_grad():
            torch.testing.assert_close(form(image), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(image).dtype == torch.float32
    assert isinstance(network.to("cpu", torch.float32), nn.Module)
