"""medconv/data/datasets/auto.py: Decathlon and nnU-Net folders are told apart."""

from pathlib import Path

import pytest
from helpers.volumes import write_json, write_msd, write_nnunet

from medconv.data.datasets.auto import auto
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.nnunet import nnunet


def test_auto_reads_both_layouts(tmp_path: Path) -> None:
    assert auto(write_msd(tmp_path / "msd")) == msd(tmp_path / "msd")
    assert auto(write_nnunet(tmp_path / "nnunet")) == nnunet(tmp_path / "nnunet")


def test_error_names_the_expected_keys(tmp_path: Path) -> None:
    message = (
        r"dataset\.json: neither a Decathlon .*`modality`, `training`.*nor.*`channel_names`.*it "
        r"has \['name', 'tasks'\]"
    )
    with pytest.raises(ValueError, match=message):
        auto(write_json(tmp_path, {"name": "x", "tasks": []}))
