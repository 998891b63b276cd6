"""medconv/training/data_setup.py: the loaders of a config."""

import pytest
from helpers.picture_tables import checked, write

from medconv import config
from medconv.config import ConfigError
from medconv.training.data_setup import build_data, prepare_data


def test_loaders_have_the_settings_of_the_config(tmp_path):
    settings = checked(write(tmp_path / "data", 20), "data.batch_size=3", "data.samples_per_epoch=20")
    prepared = prepare_data(settings)
    module = build_data(config.resolve(settings, prepared.derived), prepared)
    assert next(iter(module.train_dataloader()))["image"].shape[0] == 3
    assert [case.id for case in module.split.val] == [case.id for case in prepared.val]


def test_channels_are_left_out_only_where_they_may_be_missing(tmp_path):
    settings = checked(
        write(tmp_path / "data", 20),
        "data.batch_size=3",
        "data.samples_per_epoch=20",
        "data.channel_dropout=0.5",
    )
    prepared = prepare_data(settings)
    with pytest.raises(ConfigError, match="data.channel_dropout=0.5 needs data.missing=allow"):
        build_data(config.resolve(settings, prepared.derived), prepared)
