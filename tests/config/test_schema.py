"""medconv/config/schema.py: the config is frozen, and has the folders of `conf/` as groups."""

from dataclasses import FrozenInstanceError, fields

import pytest

from medconv.config import DataConfig, RunConfig, conf_dir


def test_a_config_cannot_be_changed() -> None:
    run_config = RunConfig(data=DataConfig(batch_size=2))
    with pytest.raises(FrozenInstanceError):
        run_config.seed = 1  # type: ignore[misc]
    plain = run_config.plain()
    plain["data"]["batch_size"] = 4
    assert run_config.data.batch_size == 2


def test_every_folder_of_options_is_a_group() -> None:
    groups = {entry.name for entry in fields(RunConfig)}
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert folders - groups == {"experiment", "hparams_search", "hydra"}
    assert groups - folders == {"seed", "tags", "test", "task", "plan", "schedule", "run", "derived"}
