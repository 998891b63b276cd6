"""Training on label maps of two raters, as a user does: store, loaders, loss, validation, summary, prediction."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.rated import add_rater

import medconv
from medconv.data.case import Case
from medconv.data.case_files import image_of
from medconv.features.ensemble import gains
from medconv.features.ensemble.members import Member
from medconv.features.raters.labels import RatedLabel, probabilities_on
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
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


def test_a_run_is_scored_against_each_rater_and_their_mean(rated):
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


def test_its_predicted_probabilities_can_be_labels_in_turn(rated, tmp_path, monkeypatch):
    """On the grid of the image, in its order of axes: what `predict` writes is what `data.soft_labels` reads."""
    checkpoint = rated / "run/checkpoints/best.ckpt"
    image = rated / "data/imagesTr/case_0.nii.gz"
    words = ("--checkpoint", checkpoint, "--input", image, "--output", tmp_path, "--save-probabilities")
    assert tiny.call(monkeypatch, "predict", *words) == 0
    label, probabilities = medconv.load(checkpoint).label_and_probabilities(image)
    np.testing.assert_array_equal(label, probabilities.argmax(0))
    path = tmp_path / "probabilities/case_0.nii.gz"
    case = Case("case_0", (image,), path, soft_label=RatedLabel(3, are_probabilities=True))
    _, grid = image_of(case)
    np.testing.assert_allclose(probabilities_on(case, grid), probabilities[1:], atol=1e-5)


def test_the_mean_of_an_ensemble_is_scored_by_the_consensus(rated, tmp_path):
    """A member that is the run's own network adds nothing to it."""
    folders = [shutil.copytree(rated / "run", tmp_path / "run")]
    folders.append(shutil.copytree(rated / "run", tmp_path / "run/members/2"))
    for checkpoint in (folders[1] / "checkpoints").glob("*.ckpt"):  # one file twice is refused
        torch.save({**torch.load(checkpoint, weights_only=True), "copied": True}, checkpoint)
    members = [Member(number, RunDir(path), ()) for number, path in enumerate(folders, 1)]
    gains.write(members, tiny.checked(rated / "data", "data.raters=[labelsTr2]"), [])
    first, second = json.loads((folders[0] / "summary.json").read_text())["members"]
    assert second["score_of_mean"] == pytest.approx(first["score_of_mean"])
