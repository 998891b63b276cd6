"""Training on label maps of two raters, as a user does: store, loaders, loss, validation, summary, prediction."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.rated import add_rater

import medconv
from medconv.utils import checkpoint_io


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two raters of which the second has all cases but one, and a run on them."""
    root = tmp_path_factory.mktemp("rated")
    add_rater(tiny.write_dataset(root / "data", 6), cases=5)
    tiny.train(
        root / "data",
        root / "run",
        "data.raters=[labelsTr2]",
        "data.num_workers=1",
        "data.flip_label_pairs=[[box,hole]]",
        "augmentation=strong",
        "task.deep_supervision=true",
        "logger=tensorboard",
    )
    return root


def test_a_run_is_scored_against_each_rater_and_their_mean(rated: Path) -> None:
    summary = json.loads((rated / "run/summary.json").read_text())
    assert len(summary["val/rater_dice"]) == 2
    assert 0 <= summary["val/brier"] <= 1 and 0 <= summary["val/calibration_error"] <= 1
    assert set(summary["val/dice_per_class"]) == {"box", "hole"}
    metrics = tiny.logged(rated / "run", "val/rater_dice/1")
    assert metrics[-1] == pytest.approx(summary["val/rater_dice"][0])
    assert tiny.logged(rated / "run", "val/brier")[-1] == pytest.approx(summary["val/brier"])
    rows = checkpoint_io.read(rated / "run/checkpoints/best.ckpt")["medconv"]["validation"]
    assert all(len(row["rater_dice"]) == 2 and len(row["dice"]) == 2 for row in rows.values())
    assert all(np.isfinite(tiny.losses(rated / "run")))


def test_its_network_predicts_label_maps_as_any_other(rated: Path) -> None:
    predictor = medconv.load(rated / "run/checkpoints/best.ckpt")
    label, probabilities = predictor.label_and_probabilities(rated / "data/imagesTr/case_0.nii.gz")
    np.testing.assert_array_equal(label, probabilities.argmax(0))
    assert set(np.unique(label)) <= {0, 1, 2}
