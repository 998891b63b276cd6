"""medconv/targets/base.py: kinds by name, and what a family accepts from a file."""

import pytest

from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.targets import Targets, all_kinds
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets


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
