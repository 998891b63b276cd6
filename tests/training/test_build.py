"""medconv/training/build.py: what a config gives the network and the task of a run."""

import json
import logging
from typing import Any

import pytest
from helpers import tiny

from medconv.config import ConfigError
from medconv.inference.load import load
from medconv.models.unet import UNet


@pytest.fixture(scope="module")
def kidneys(tmp_path_factory):
    """The tiny dataset with names that have sides."""
    root = tiny.write_dataset(tmp_path_factory.mktemp("kidneys") / "tiny")
    meta = json.loads((root / "dataset.json").read_text())
    meta["labels"] = {"0": "background", "1": "left_kidney", "2": "right_kidney"}
    (root / "dataset.json").write_text(json.dumps(meta))
    return root


PAIRS = "data.flip_label_pairs=[[left_kidney,right_kidney]]"


def test_pairs_reach_augmentation_validation_and_prediction(kidneys, tmp_path):
    settings = [
        PAIRS,
        "augmentation.mirror_axes=[0]",
        "task.mirror_axes=[0]",
        f"augmentation._target_={__name__}.RecordingAugment",
    ]
    tiny.train(kidneys, tmp_path / "run", *settings, "trainer.max_steps=1")
    arguments = RecordingAugment.arguments
    assert arguments["flip_label_pairs"] == ((1, 2),) and arguments["left_right_axis"] == 0
    model = load(tmp_path / "run/checkpoints/last.ckpt")
    assert model.window.flip_label_pairs == ((1, 2),) and model.window.mirror_axes == (0,)


class RecordingAugment:
    """An augmentation that does nothing and records its arguments."""

    arguments: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        type(self).arguments = arguments

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def test_sync_batchnorm_reaches_the_switches(kidneys, tmp_path, caplog):
    settings = ["trainer.sync_batchnorm=true", "perf=fast", "trainer.max_steps=1", "model.norm=batch"]
    with caplog.at_level(logging.INFO, "medconv"):
        tiny.train(kidneys, tmp_path / "run", *settings)
    assert "batch norms stay as they are" in caplog.text


def test_frozen_statistics_would_not_survive_sync_batchnorm(kidneys, tmp_path):
    """It makes new norms of all, which train."""
    settings = [
        "trainer.sync_batchnorm=true",
        "trainer.max_steps=1",
        "model.norm=batch",
        "init.freeze=[encoder]",
    ]
    with pytest.raises(ConfigError, match="also those whose statistics init.freeze keeps"):
        tiny.train(kidneys, tmp_path / "run", *settings)


class WithoutStages(UNet):
    """A network that only returns its last stage."""

    supports_deep_supervision = False


def test_heads_for_a_network_without_stages_are_an_error_about_the_key(kidneys, tmp_path):
    settings = [f"model._target_={__name__}.WithoutStages", "task.deep_supervision=true"]
    with pytest.raises(ConfigError, match=r"^task\.deep_supervision=true needs our own U-Net"):
        tiny.train(kidneys, tmp_path / "run", *settings)


@pytest.mark.parametrize("more", [[], ["data.spatial_dims=2"]])
def test_equivariant_network_is_an_error(kidneys, tmp_path, more):
    with pytest.raises(
        ConfigError, match=r"conv mirrors along axis 0.*cannot tell left_kidney from right_kidney"
    ):
        tiny.train(kidneys, tmp_path / "run", PAIRS, "conv=mirror", *more)


def test_equivariance_along_another_axis_is_allowed(kidneys, tmp_path):
    tiny.train(kidneys, tmp_path / "run", PAIRS, "conv=mirror", "conv.axes=[1]", "trainer.max_steps=1")


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (["augmentation.mirror_axes=[0]"], "flip_label_pairs=[[left_kidney,right_kidney]] would"),
        (["conv=mirror"], "so it cannot tell left_kidney from right_kidney"),
        (["augmentation.mirror_axes=[1]"], None),
        (["augmentation.mirror_axes=[0]", PAIRS], None),
    ],
)
def test_one_warning_if_sides_are_mixed(kidneys, tmp_path, settings, warning, caplog):
    with caplog.at_level(logging.WARNING, "medconv"):
        tiny.train(kidneys, tmp_path / "run", *settings, "trainer.max_steps=1")
    messages = [record.getMessage() for record in caplog.records if "left_kidney" in record.getMessage()]
    assert len(messages) == (warning is not None)
    assert warning is None or warning in messages[0]
