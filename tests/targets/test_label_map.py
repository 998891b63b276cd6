"""medconv/targets/label_map.py: logits to label maps and probabilities, and voxels to ignore."""

import pytest
import torch

from medconv.targets.label_map import LabelMapTargets

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
IGNORING = LabelMapTargets.of_classes(["background", "a", "b"], ignore=9)


@pytest.mark.parametrize("axes", [2, 3])
def test_classes_are_decoded_to_the_highest_channel(axes):
    """Also from an iterator of channels; the first of equals counts."""
    logits = torch.randn(4, *(5, 6, 7)[:axes], generator=torch.Generator().manual_seed(0)).round()
    label = CLASSES.decode(iter(logits[:3]))
    assert torch.equal(label, logits[:3].argmax(0).to(torch.int16))
    assert torch.equal(CLASSES.decode_mean(logits), logits.argmax(0).to(torch.int16))


def test_unlabelled_voxels_become_background_and_are_not_known():
    label = torch.tensor([[[[0, 1, 9], [2, 9, 1]]]])
    assert IGNORING.reference(label).tolist() == [[[[0, 1, 0], [2, 0, 1]]]]
    assert IGNORING.labelled(label).tolist() == [[[[True, True, False], [True, False, True]]]]
    assert CLASSES.labelled(label) is None


def test_probabilities_are_a_softmax_channel_by_channel():
    logits = torch.randn(3, 4, 5)
    log_total = CLASSES.log_total(iter(logits))
    channels = torch.stack([CLASSES.probability(channel, log_total) for channel in logits])
    torch.testing.assert_close(channels, logits.softmax(0))
