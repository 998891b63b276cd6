"""medconv/targets/parse.py: classes, regions and the value to ignore, of a dataset.json and of a config."""

import numpy as np
import pytest
from helpers.volumes import edit_json, label_array, save, tiny, write_msd, write_nnunet

from medconv.data.case_files import label_of
from medconv.data.datasets.dataset_json import msd, nnunet, targets_of
from medconv.data.preprocessing.examine import examine
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

REGIONS = {"background": 0, "lesion": [1, 2], "small": 2, "ignore": 3}
CONFIGS = [
    (None, None, None, LabelMapTargets.of_classes(["background", "big", "small"])),
    (None, None, 255, LabelMapTargets.of_classes(["background", "big", "small"], 255)),
    (None, None, 2, LabelMapTargets.of_classes(["background", "big"], 2)),
    (None, None, "small", LabelMapTargets.of_classes(["background", "big"], 2)),
    (
        {"all": ["big", 2], "small": "small"},
        [1, 2],
        None,
        RegionTargets(("all", "small"), ((1, 2), (2,)), None, (1, 2)),
    ),
    ({"a": 2, "b": [1]}, None, 9, RegionTargets(("a", "b"), ((2,), (1,)), 9, (2, 1))),
]


def test_regions_and_ignore_of_an_nnunet_dataset(tmp_path):
    root = edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=[1, 2])
    dataset = nnunet(root)
    assert dataset.class_names == ("background", "label 1", "small")
    targets = RegionTargets(("lesion", "small"), ((1, 2), (2,)), 3, (1, 2))
    assert dataset.targets == targets == targets_of(root)


@pytest.mark.parametrize(
    "labels", [{"0": "background", "1": "big", "5": "ignore"}, {"background": 0, "big": 1, "ignore": 5}]
)
def test_ignore_is_a_value_and_not_a_class(tmp_path, labels):
    write, read = (write_msd, msd) if "0" in labels else (write_nnunet, nnunet)
    dataset = read(edit_json(write(tmp_path), labels=labels))
    assert dataset.class_names == ("background", "big")
    assert dataset.targets.ignore == 5


@pytest.mark.parametrize(
    "labels", [{**REGIONS, "small": 2_000_000_000}, {**REGIONS, "ignore": 2_000_000_000}]
)
def test_label_values_above_16_bits_are_refused(tmp_path, labels):
    root = edit_json(write_nnunet(tmp_path), labels=labels, regions_class_order=[1, 2])
    with pytest.raises(
        ValueError, match=r"dataset\.json: label values must lie in 0 to 32767, got {'\w+': 2000000000}"
    ):
        nnunet(root)


@pytest.mark.parametrize(("regions", "order", "ignore", "targets"), CONFIGS)
def test_the_config_changes_the_targets(tmp_path, regions, order, ignore, targets):
    dataset = tiny(tmp_path).with_targets(regions=regions, regions_order=order, ignore_label=ignore)
    assert dataset.targets == targets
    assert len(dataset.class_names) == (2 if targets.ignore == 2 else 3)


def test_the_config_overrides_only_the_keys_it_sets(tmp_path):
    dataset = nnunet(edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=[1, 2]))
    assert (
        dataset.with_targets(regions=None, regions_order=None, ignore_label=None).targets == dataset.targets
    )
    assert (
        dataset.with_targets(regions=None, regions_order=None, ignore_label="ignore").targets
        == dataset.targets
    )
    assert dataset.with_targets(regions=None, regions_order=None, ignore_label=7).targets.ignore == 7
    assert dataset.with_targets(
        regions={"small": [2]}, regions_order=None, ignore_label=None
    ).targets == RegionTargets(("small",), ((2,),), 3, (2,))


@pytest.mark.parametrize(
    ("regions", "order", "ignore", "message"),
    [
        (
            {"a": [1, 3]},
            None,
            None,
            r"regions: a must name different label values from 1 to 2: 3 is not a fore",
        ),
        ({"a": [0, 1]}, None, None, r"regions: a must name .*: 0 is not a foreground value"),
        ({"a": [1, 1]}, None, None, r"regions: a must name different .*got \[1, 1\]"),
        ({"a": []}, None, None, r"regions: a must name .*got \[\]"),
        ({"a": ["bigg"]}, None, None, r"regions: a: bigg is not a class; did you mean big\?"),
        ({"a": ["big", "small"]}, None, 2, r"regions: a: small is not a class; the classes are big"),
        ({"a": [1, 9]}, None, 9, r"regions: a must name .*: 9 is the value to ignore"),
        ({"a": [1, 2], "b": [2]}, None, None, r"regions_order is needed, as a and b overlap: .*\['a', 'b'\]"),
        ({"a": [1, 2], "b": [2]}, [1], None, r"regions_order must give each of \['a', 'b'\] .*, got \[1\]"),
        ({"a": [1, 2], "b": [2]}, [2, 2], None, r"regions_order must give .*, got \[2, 2\]"),
        (
            {"a": [1, 2], "b": [2]},
            [2, 1],
            None,
            r"regions_order must give .*one that lies in it, got \[2, 1\]",
        ),
        (None, [1, 2], None, r"regions_order=\[1, 2\] needs regions, which is not set"),
        (None, None, 1, r"ignore_label must be above all classes, from 2 \(small.*got 1, class big"),
        (None, None, 0, r"ignore_label must be above.*got 0, class background"),
        (None, None, -1, r"ignore_label must be above.*got -1, not a label value"),
        (None, None, 40000, r"ignore_label must be above.*to 32767, got 40000"),
        (None, None, [9, 1], r"ignore_label must be one value, or a list of different values .*3 to"),
        (None, None, [9, 9], r"ignore_label must be one value, or a list of different values above all"),
        (None, None, [], r"ignore_label must be one value, or a list"),
        (None, None, "smal", r"ignore_label: smal is not a class; did you mean small\?"),
    ],
)
def test_values_of_the_config_that_fit_no_dataset_are_refused(tmp_path, regions, order, ignore, message):
    with pytest.raises(ValueError, match=message):
        tiny(tmp_path).with_targets(regions=regions, regions_order=order, ignore_label=ignore)


def test_the_only_class_cannot_be_ignored(tmp_path):
    dataset = msd(edit_json(write_msd(tmp_path), labels={"0": "background", "1": "box"}))
    with pytest.raises(
        ValueError, match=r"ignore_label must be above all classes, from 2 to 32767, got 1, class box"
    ):
        dataset.with_targets(regions=None, regions_order=None, ignore_label=1)


def test_of_several_values_to_ignore_label_maps_are_read_with_the_first(tmp_path):
    dataset = tiny(tmp_path).with_targets(regions=None, regions_order=None, ignore_label=[9, 254, 255])
    assert (dataset.targets.ignore, dataset.targets.also_ignored) == (9, (254, 255))
    label = label_array(0).astype(np.int16)
    label[0], label[1] = 254, 255
    save(dataset.cases[0].files[1], label)
    label[:2] = 9
    np.testing.assert_array_equal(label_of(dataset.cases[0])[0], label)
    assert not examine(dataset.cases[0], dataset).errors
    save(dataset.cases[0].files[1], label_array(0) + 3)
    assert (
        "label values [3, 4, 5] are not declared, expected 0, 1, 2, 9, 254, 255"
        in (examine(dataset.cases[0], dataset).errors[0])
    )


@pytest.mark.parametrize("order", [[[1], [2]], ["1", "2"], "12", 1])
def test_an_order_without_one_value_per_region_is_refused(tmp_path, order):
    root = edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=order)
    with pytest.raises(
        ValueError, match=r"regions_class_order must give each of \['lesion', 'small'\] a label value"
    ):
        nnunet(root)


INNER_FIRST = {"e": 3, "c": [2, 3], "w": [1, 2, 3]}


@pytest.mark.parametrize(
    ("regions", "order", "expected"),
    [
        (
            INNER_FIRST,
            [3, 2, 1],
            r"dataset\.json: regions_class_order: \[3, 2, 1\] .* writes over e wherever it",
        ),
        ({"x": [1, 3], "y": [2, 3]}, [1, 2], "writes over x where the label value is 3"),
        (dict(reversed(INNER_FIRST.items())), [1, 2, 3], None),
    ],
)
def test_a_region_that_no_label_map_can_hold_is_named(tmp_path, caplog, regions, order, expected):
    labels = {"background": 0, **regions}
    root = edit_json(write_nnunet(tmp_path), labels=labels, regions_class_order=order)
    if expected and "wherever" in expected:
        with pytest.raises(ValueError, match=expected):
            nnunet(root)
    else:
        assert nnunet(root).targets.order == tuple(order)
        assert (expected or "") in caplog.text and bool(expected) == bool(caplog.text)
