"""medconv/data/datasets/decathlon.py: cases of Medical Segmentation Decathlon folders, invalid dataset.json."""

from pathlib import Path
from typing import Any

import pytest
from helpers.volumes import CLASSES, SHAPE, edit_json, image_array, label_array, write_msd

from medconv.data.datasets.decathlon import msd


def test_msd_reads_the_training_cases(tmp_path: Path) -> None:
    dataset = msd(write_msd(tmp_path / "Task", 12))
    assert (dataset.name, dataset.class_names, dataset.modalities) == ("Tiny", CLASSES, ("MRI",))
    assert [case.id for case in dataset.cases] == sorted(f"case_{i}" for i in range(12))
    for case in dataset.cases:
        assert case.images == (tmp_path / f"Task/imagesTr/{case.id}.nii.gz",)
        assert case.label == tmp_path / f"Task/labelsTr/{case.id}.nii.gz"
        assert all(path.is_file() for path in case.files)


BAD_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "no training": ({"training": None}, "`training` must list at least one case, got None"),
    "an nnU-Net": ({"training": None, "channel_names": {"0": "MRI"}}, "take data=nnunet"),
    "empty training": ({"training": []}, r"`training` must list at least one case, got \[\]"),
    "entry without label": ({"training": [{"image": "a.nii.gz"}]}, "needs the keys `image` and `label`"),
    "no modality": ({"modality": None}, "`modality` must map channel numbers to names"),
    "gap in modalities": ({"modality": {"0": "a", "2": "b"}}, "`modality` must map.*got.*'2': 'b'"),
    "no labels": ({"labels": None}, "`labels` must name the background and at least one class, got None"),
    "background only": (
        {"labels": {"0": "background"}},
        "`labels` must name the background and at least one",
    ),
    "gap in labels": ({"labels": {"0": "background", "1": "a", "3": "b"}}, r"without a gap.*got \[0, 1, 3\]"),
    "equal names": ({"labels": {"0": "background", "1": "a", "2": "a"}}, "a different name, got.*'a', 'a'"),
}


@pytest.mark.parametrize("fault", BAD_JSON)
def test_invalid_dataset_json_is_an_error(tmp_path: Path, fault: str) -> None:
    changes, message = BAD_JSON[fault]
    root = edit_json(write_msd(tmp_path), **changes)
    with pytest.raises(ValueError, match=message) as error:
        msd(root)
    assert str(error.value).startswith(f"{root / 'dataset.json'}: ")


def test_tiny_dataset_holds_every_class() -> None:
    """Else other tests would test nothing."""
    assert set(label_array(0).ravel()) == {0, 1, 2} and image_array(0).shape == SHAPE
