"""medconv/inference/load.py: checkpoints that are loaded, refused or damaged."""

from pathlib import Path

import pytest
import torch
from helpers import members
from helpers.configs import derived
from torch.nn.utils import parametrize

from medconv.config import DataConfig
from medconv.inference.load import _rounding, explaining_damage, load


def test_a_loaded_network_is_folded_and_in_evaluation_mode(exported):
    model = load(exported.checkpoint)
    assert model.spacing_range_mm == ((1.0, 1.0), (1.5, 1.5), (2.0, 2.0))
    assert model.path == exported.checkpoint
    layers = list(model.network.modules())
    assert not any(isinstance(layer, torch.nn.Dropout) and layer.training for layer in layers)
    assert not any(parametrize.is_parametrized(layer) for layer in layers)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda r: r["targets"].update(kind="detection"),
            "another version: the kind of targets must be one of .*, got 'detection'",
        ),
        (lambda r: r.pop("preprocessing"), "damaged, or written by another version.*preprocessing"),
        (lambda r: r.update(config={}), "damaged, or written by another version.*'run'"),
        (
            lambda r: r["config"]["init"].update(_target_="os.system"),
            r"damaged.* \(config\.init\._target_: ConfigKeyError: Key '_target_' not in 'InitConfig'\)$",
        ),
        (lambda r: r["config"]["derived"].pop("strides"), "damaged, or written by another version.*strides"),
    ],
)
def test_checkpoints_of_another_task_or_with_missing_metadata_are_refused(exported, tmp_path, edit, message):
    path = members.variant(exported.checkpoint, tmp_path / "b.ckpt", edit)
    with members.refused(rf"^{path}: .*{message}"):
        load(path)


def test_2d_images_of_one_size_are_rounded_up_to_the_strides():
    images = derived(spatial_dims=2, strides=[[2, 2], [2, 1]])
    assert _rounding(DataConfig(), images) == (4, 2)
    for data in (DataConfig(patch_size=[16, 16]), DataConfig(resize=[16, 16])):  # training took several sizes
        assert _rounding(data, images) == ()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"version": "0.0.1"},
            r"^a.ckpt: damaged, or written by another version \(written by medconv 0.0.1, this is",
        ),
        (
            {"version": 3},
            r"^a.ckpt: damaged, or written by another version: its metadata cannot be read \(KeyError: ",
        ),
        ([], r"^a.ckpt: damaged, or written by another version: its"),
    ],
)
def test_an_error_names_the_checkpoint_and_its_version(metadata, message):
    with pytest.raises(ValueError, match=message), explaining_damage(Path("a.ckpt"), metadata):
        raise KeyError("targets")


def test_messages_for_users_stay():
    with pytest.raises(ValueError, match="^mine$"), explaining_damage(Path("a.ckpt"), {}):
        raise ValueError("mine")
