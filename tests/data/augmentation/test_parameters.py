import torch

from medconv.data.augmentation.parameter_sampler import ParameterSampler
from medconv.data.augmentation.parameters import PER_CHANNEL


def test_rows_are_samples_times_channels() -> None:
    sampler = ParameterSampler(0, (1.0, 1.0), (8, 8), p={"brightness": 1.0, "blur": 1.0})
    parameters = sampler.sample([3, 4], num_channels=3)
    rows = parameters.per_row()
    assert tuple(rows) == PER_CHANNEL
    assert rows["blur"].shape == (6, 2)
    torch.testing.assert_close(rows["brightness"][4], parameters.brightness[1, 1], rtol=0, atol=0)
