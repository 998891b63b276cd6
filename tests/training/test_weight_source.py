"""medconv/training/weight_source.py: a feature reads `init.pretrained`, and without it one line says so."""

import pytest

from medconv import doors
from medconv.config import ConfigError
from medconv.training.weight_source import weight_source


def test_without_a_feature_that_reads_it_one_line_says_so(monkeypatch):
    monkeypatch.setattr(doors, "features", lambda: ())
    with pytest.raises(
        ConfigError, match=r"init\.pretrained=best\.ckpt: needs medconv\.features\.pretrained,"
    ):
        weight_source("best.ckpt")


def test_a_folder_is_one_of_nnunet(tmp_path):
    with pytest.raises(ConfigError, match="a folder must be that of a trained nnU-Net v2 configuration"):
        weight_source(str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"the folder of a run; name its weights, .*checkpoints/best\.ckpt"):
        weight_source(str(tmp_path))
