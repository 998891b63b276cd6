"""medconv/targets/: kinds of targets, label maps and regions, and what all label maps share."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.targets import Targets, all_kinds
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.targets.segmentation import SegmentationTargets, labelled_row, over_voxels, takes_mask

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
IGNORING = LabelMapTargets.of_classes(["background", "a", "b"], ignore=9)
SEVERAL = replace(IGNORING, also_ignored=(7, 8))
REGIONS = RegionTargets(("lesion", "core"), ((1, 2), (2,)), None, (1, 2))


def test_numbers_of_outputs_and_values():
    assert (CLASSES.num_outputs, CLASSES.num_values) == (3, 3)
    assert (REGIONS.num_outputs, REGIONS.num_values, REGIONS.words) == (2, 3, "lesion=1+2, core=2")


@pytest.mark.parametrize(
    "targets", [CLASSES, IGNORING, SEVERAL, REGIONS], ids=["classes", "ignoring", "several", "regions"]
)
def test_targets_return_from_a_file(targets):
    assert SegmentationTargets.from_plain(targets.plain()) == targets


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": None}, "expected a list"),
        ({"names": ["a", " "]}, "class names must differ from each other and not be blank"),
        ({"values": [[1]]}, "each name needs its label values"),
        ({"values": [[1], [70000]]}, "label values must be whole numbers from 1 to 32767"),
        ({"values": [[1], [1]]}, "each name needs a label value of its own"),
        (
            {"kind": "regions", "order": [1, 3]},
            "the label value that a region writes must be one of its values",
        ),
        ({"ignore": 2}, "the label value to ignore must not be a class"),
        ({"ignore": 9, "also_ignored": [1]}, "the label value to ignore must not be a class"),
    ],
)
def test_invalid_content_of_a_file_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SegmentationTargets.from_plain({**CLASSES.plain(), **changes})
    with pytest.raises(ValueError, match="targets of label maps need names, values and ignore"):
        SegmentationTargets.from_plain({"kind": "label_map", "names": ["a"]})


def test_label_maps_have_one_value_to_ignore():
    label = np.array([0, 7, 2, 8, 9], np.int16)
    assert SEVERAL.one_ignored(label).tolist() == [0, 9, 2, 9, 9] and IGNORING.one_ignored(label) is label


def test_label_values_have_names_of_their_classes_or_regions():
    assert LabelMapTargets(("liver", "tumour"), ((1,), (2,))).value_names == {1: "liver", 2: "tumour"}
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)))
    assert regions.value_names == {1: "whole", 2: "whole + core"}


def test_labelled_voxels_keep_their_order_and_channels():
    values = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    labelled = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    row = labelled_row(values, labelled)
    assert row.shape == (1, 3, int(labelled.sum()), 1)
    expected = [values[b, :, y, x] for b, _, y, x in labelled.nonzero().tolist()]
    assert torch.equal(row[0, :, :, 0], torch.stack(expected, 1))


def test_flags_of_outputs_have_one_value_for_all_voxels():
    flags = torch.tensor([[True, False]])
    assert over_voxels(flags, torch.zeros(1, 2, 3, 4, 5)).shape == (1, 2, 1, 1, 1)


def test_a_loss_tells_by_its_arguments_whether_it_takes_a_mask():
    class Masked(nn.Module):
        def forward(self, outputs: torch.Tensor, reference: torch.Tensor, labelled: torch.Tensor) -> None: ...

    assert takes_mask(Masked()) and takes_mask(lambda a, b, labelled: a)
    assert not takes_mask(nn.CrossEntropyLoss()) and not takes_mask(lambda a, b: a)


def test_every_kind_is_found_by_its_name():
    assert {"label_map", "regions", "multiclass", "multilabel", "regression"} <= set(all_kinds())
    for name, kind in all_kinds().items():
        assert kind.kind == name and issubclass(kind, Targets)


def test_a_family_accepts_its_own_kinds_alone():
    classes, label_map = MulticlassTargets(("a", "b")), LabelMapTargets.of_classes(["background", "a"])
    assert Targets.from_plain(classes.plain()) == ImageLevelTargets.from_plain(classes.plain()) == classes
    assert SegmentationTargets.from_plain(label_map.plain()) == label_map
    with pytest.raises(ValueError, match=r"must be one of label_map, regions, .*soft.*, got 'multiclass'"):
        SegmentationTargets.from_plain(classes.plain())
    for content in (None, "multiclass", {"kind": ["multiclass"]}, {"names": ["a", "b"]}):
        with pytest.raises(ValueError, match="the kind of targets must be one of"):
            Targets.from_plain(content)


def test_a_description_tells_targets_apart():
    assert MulticlassTargets(("a", "b")).description == "multiclass: a, b"
    assert LabelMapTargets.of_classes(["background", "a"]).description == "label_map: a=1"


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


def test_decoding_the_masks_gives_the_label():
    label = torch.randint(3, (2, 1, 5, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    masks = REGIONS.reference(label)
    assert masks.shape == (2, 2, 5, 6)
    assert torch.equal(REGIONS.decode(2 * masks[0] - 1), label[0, 0].to(torch.int16))


def test_a_region_is_where_its_mean_probability_is_above_one_half():
    probabilities = torch.tensor([[0.6, 0.6, 0.4], [0.2, 0.7, 0.5]])
    assert REGIONS.decode_mean(iter(probabilities)).tolist() == [1, 2, 0]


def test_regions_tell_label_values_apart_that_one_of_them_separates():
    assert REGIONS.distinguishes(1, 2) and not RegionTargets(("all",), ((1, 2),), None, (1,)).distinguishes(
        1, 2
    )
