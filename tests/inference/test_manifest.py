"""The manifest of an output folder, and why new predictions do not fit beside old ones."""

import json

import pytest

from medconv.inference.output import MANIFEST, case_entry, differences, read_manifest

A = {"images": ["/a.nii"], "stamps": [[1, 2]]}


def test_a_manifest_is_read_back(tmp_path):
    assert read_manifest(tmp_path) == {}
    manifest = {"settings": {"overlap": 0.5}, "cases": {"a": A}, "overwriting": ["a"], "checkpoint": "x"}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": []},
        {"overwriting": [1]},
        {"cases": {"a": {**A, "stamps": []}}},
        {"cases": {"a": {"images": [], "stamps": []}}},
    ],
)
def test_a_damaged_manifest_counts_as_none(tmp_path, changes):
    manifest = {"settings": {}, "cases": {"a": A}, "overwriting": [], **changes}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert read_manifest(tmp_path) == {}


def test_the_entry_of_a_case_changes_with_its_image(tmp_path):
    image = tmp_path / "a.nii"
    assert case_entry([image]) == {"images": [str(image)], "stamps": [None]}
    image.write_text("1")
    before = case_entry([image])
    image.write_text("22")
    assert before["stamps"][0] and case_entry([image]) != before


def test_differing_settings_are_named_with_both_values():
    assert differences({"overlap": 0.5, "same": 1}, {"same": 1, "flips": [0]}) == [
        "flips: None there, [0] now",
        "overlap: 0.5 there, None now",
    ]


def test_files_are_not_named_by_their_hashes():
    old = {"checkpoints": ["ab12"], "postprocess": None}
    assert differences(old, {**old, "checkpoints": ["cd34"]}) == ["another checkpoint"]
    assert differences(old, {**old, "postprocess": "ef56"}) == ["another post-processing, or none"]
