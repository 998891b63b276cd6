"""Running statistics of batch norms, restored (nonfinite_guard.py) or kept fixed (freeze.py)."""

import pytest
import torch
from torch import nn

from medconv.models.freeze import fix_statistics
from medconv.training.callbacks.nonfinite_guard import RunningStatistics


def network():
    conv = nn.Conv2d(1, 3, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(3), nn.InstanceNorm2d(3), nn.BatchNorm2d(3, affine=False))


@pytest.mark.parametrize(
    ("where", "restored"), [(None, True), (torch.tensor(True), True), (torch.tensor(False), False)]
)
def test_restore_undoes_the_forward_passes_since_now(where, restored):
    model = network()
    model(torch.randn(2, 1, 6, 6))
    statistics = RunningStatistics(model)
    before, saved = {name: value.clone() for name, value in model.named_buffers()}, statistics.now()
    model(torch.randn(2, 1, 6, 6) + 5)
    statistics.restore(saved, where)
    assert len(before) == 6
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]) == restored, name


def test_a_network_without_running_statistics_has_nothing_to_restore():
    statistics = RunningStatistics(nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3)))
    assert statistics.now() == []
    statistics.restore([])


def test_a_fixed_norm_stays_in_evaluation_mode_with_its_names_and_class():
    model = network()
    keys, before = list(model.state_dict()), model[1].running_mean.clone()
    for _ in range(2):  # the second call changes nothing
        fix_statistics(model[1])
    assert type(model[1]).__name__ == "FixedBatchNorm2d" and isinstance(model[1], nn.BatchNorm2d)
    model.train()(torch.randn(2, 1, 6, 6))
    assert not model[1].training and torch.equal(model[1].running_mean, before)
    assert model[3].training and int(model[3].num_batches_tracked) == 1
    assert list(model.state_dict()) == keys
