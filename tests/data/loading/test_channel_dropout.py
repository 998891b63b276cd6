"""medconv/data/loading/channel_dropout.py: which channels samples lack, by chance and because their case does."""

import pytest
import torch

from medconv.data.loading.channel_dropout import ChannelDropout, without_dropped

DROPOUT = ChannelDropout(0.4, 3, {"lacks": (1,), "one": (0, 2)}, seed=0)


def test_channels_are_dropped_with_the_probability_and_one_is_kept() -> None:
    kept = torch.stack([DROPOUT.kept("whole", sample) for sample in range(2000)])
    assert kept.any(1).all()
    # all three are dropped in 0.4^3 of the samples, and then one of them is kept after all
    torch.testing.assert_close(kept.float().mean(0), torch.full((3,), 0.6 + 0.4**3 / 3), atol=0.03, rtol=0)
    assert torch.equal(kept[7], DROPOUT.kept("whole", 7))


def test_what_the_case_lacks_is_never_kept() -> None:
    kept = torch.stack([DROPOUT.kept("lacks", sample) for sample in range(200)])
    assert not kept[:, 1].any() and kept.any(1).all() and not kept[:, 0].all()
    assert all(DROPOUT.kept("one", sample).tolist() == [False, True, False] for sample in range(20))


def test_dropped_channels_are_exactly_0() -> None:
    image = torch.randn(2, 3, 4, 5)
    image[0, 1] = torch.nan
    kept = torch.tensor([[True, False, True], [False, True, True]])
    dropped = without_dropped({"image": image, "kept": kept, "sample": 1})["image"]
    assert not dropped[~kept].any()
    assert torch.equal(dropped[kept], image[kept])


def test_a_probability_of_1_is_refused() -> None:
    with pytest.raises(ValueError, match="channel_dropout must be from 0 to below 1, got 1"):
        ChannelDropout(1, 2, {}, 0)
