"""medconv/data/datasets/image_mask.py: pictures and masks from two folders or by two glob patterns."""

from pathlib import Path

import pytest
from helpers.volumes import pixels

from medconv.data.datasets.image_mask import image_mask
from medconv.data.io.raster import write_picture


def test_channels_are_those_of_the_pictures(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for name in "ba":
        write_picture(tmp_path / f"images/{name}.png", pixels(0, (8, 9, 3)))
        write_picture(tmp_path / f"masks/{name}_mask.png", pixels(1) // 128)
    dataset = image_mask(f"{tmp_path}/images/*.png", f"{tmp_path}/masks/*_mask.png", ["skin", "mole"])
    assert [case.id for case in dataset.cases] == ["a", "b"]
    assert dataset.cases[0].label == tmp_path / "masks/a_mask.png"
    assert dataset.modalities == ("red", "green", "blue")
    assert dataset.class_names == ("skin", "mole")
    assert dataset.targets.per_voxel and not dataset.errors


@pytest.mark.parametrize(("images", "labels"), [("", "masks"), ("images", "")])
def test_missing_setting_is_an_error(images: str, labels: str) -> None:
    with pytest.raises(ValueError, match=r"data=image_mask needs both data\.images and data\.labels"):
        image_mask(images, labels)
