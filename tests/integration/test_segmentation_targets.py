"""Whole runs with regions and with ignored voxels; checkpoints of other tasks; nnU-Net's recipe."""

import csv
import json

import nibabel as nib
import numpy as np
import pytest
import yaml
from helpers import tiny

from medconv.config import conf_dir
from medconv.inference.load import load

REGIONS = ["data.regions={both:[box,hole],hole:[hole]}", "data.regions_order=[1,2]"]
LEARNING = ["trainer.max_steps=60", "data.samples_per_epoch=60", "optimizer.lr=2e-2"]


def last_row(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/dice")]
    return {key: float(value) for key, value in rows[-1].items() if value}


@pytest.fixture(scope="module")
def scribbles(tmp_path_factory):
    """Of each case nothing is known (255) but a few slices; and what is wrong lies where nothing is known."""
    root = tiny.write_dataset(tmp_path_factory.mktemp("data") / "scribbles")
    for path in (root / "labelsTr").glob("*.nii.gz"):
        image = nib.load(path)
        label = np.asarray(image.dataobj).copy()
        label[:, :, [0, 1, 5, 6, 10, 11]] = 255
        nib.save(nib.Nifti1Image(label, image.affine), path)
    return root


@pytest.fixture(scope="module")
def of_regions(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "regions"
    tiny.train(dataset, folder, *REGIONS, *LEARNING)
    return folder


def test_regions_are_learned_and_predicted(of_regions, dataset, tmp_path, monkeypatch):
    summary = json.loads((of_regions / "summary.json").read_text())
    assert set(summary["val/dice_per_class"]) == {"both", "hole"}
    assert summary["val/dice_per_class"]["both"] > 0.4
    model = load(of_regions / "checkpoints/best.ckpt")
    assert model.targets.names == ("both", "hole") and model.targets.order == (1, 2)
    files = [
        "--checkpoint",
        of_regions / "checkpoints/best.ckpt",
        "--input",
        dataset / "imagesTr/case_0.nii.gz",
    ]
    assert tiny.call(monkeypatch, "predict", *files, "--output", tmp_path / "out") == 0
    label = np.asarray(nib.load(tmp_path / "out/case_0.nii.gz").dataobj)
    assert set(np.unique(label)) <= {0, 1, 2} and label.any()


def _segmentation_losses():
    """The options of `loss` that are not for other targets, without the default."""
    others = {"auto", "dice_ce", "soft_dice_ce", "bce", "cross_entropy", "huber", "l1", "mse"}
    others |= {"image_l1", "image_ssim", "heatmap", "joint"}
    return sorted({path.stem for path in (conf_dir() / "loss").glob("*.yaml")} - others)


@pytest.mark.parametrize("loss", _segmentation_losses())
@pytest.mark.parametrize("which", ["regions", "ignore"])
def test_further_losses_take_what_the_default_takes(dataset, scribbles, tmp_path, loss, which):
    where, more = (dataset, REGIONS) if which == "regions" else (scribbles, ["data.ignore_label=255"])
    tiny.train(where, tmp_path / "run", f"loss={loss}", *more, "trainer.max_steps=2")
    assert np.isfinite(tiny.losses(tmp_path / "run")).all()


def test_sparse_annotation_is_enough_to_learn_from(scribbles, dataset, tmp_path):
    summary = tiny.train(scribbles, tmp_path / "run", "data.ignore_label=255", *LEARNING)
    assert set(summary["val/dice_per_class"]) == {"box", "hole"} and summary["val/dice"] > 0.3
    assert np.isfinite(last_row(tmp_path / "run")["val/cross_entropy"])


def test_what_is_ignored_does_not_change_a_run(dataset, scribbles, tmp_path):
    """The image there does; its label, which is not known, does not: 255 or 300 is the same."""
    other = tiny.write_dataset(tmp_path / "other")
    for path in (other / "labelsTr").glob("*.nii.gz"):
        label = np.asarray(nib.load(scribbles / "labelsTr" / path.name).dataobj).astype(np.int16)
        nib.save(nib.Nifti1Image(np.where(label == 255, 300, label), nib.load(path).affine), path)
    for name, where, value in (("one", scribbles, 255), ("two", other, 300)):
        tiny.train(where, tmp_path / name, f"data.ignore_label={value}")
    assert tiny.losses(tmp_path / "one") == tiny.losses(tmp_path / "two")


def test_a_checkpoint_of_another_task_is_named(of_regions, dataset, tmp_path):
    path = of_regions / "checkpoints/last.ckpt"
    with pytest.raises(ValueError) as error:
        tiny.train(dataset, tmp_path / "run", f"run.resume={path}")
    assert str(error.value) == (
        f"run.resume={path}: a checkpoint of another task: it is for regions both, hole (2 outputs) in 3D images of "
        "1 channel, this run for label_map box, hole (3 outputs) in 3D images of 1 channel"
    )


def test_a_checkpoint_of_another_network_is_named_before_it_is_resumed(of_regions, dataset, tmp_path):
    path = of_regions / "checkpoints/last.ckpt"
    with pytest.raises(
        ValueError, match=rf"run\.resume={path}: its weights do not fit this network: network\.encoder\.0"
    ):
        tiny.train(dataset, tmp_path / "run", *REGIONS, f"run.resume={path}", "model.channels=[6,8]")


@pytest.mark.parametrize("data", ["3d", "2d"])
def test_nnunets_recipe(dataset, tmp_path, data):
    more = [] if data == "3d" else ["data.spatial_dims=2"]
    steps = [
        "trainer.max_steps=2",
        "trainer.limit_train_batches=2",
        "data.batch_size=2",
        "model.channels=[4,8]",
    ]
    tiny.train(dataset, tmp_path / "run", "experiment=nnunet", *more, *steps)
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["optimizer"]["_target_"] == "torch.optim.SGD" and config["scheduler"]["power"] == 0.9
    assert config["trainer"]["gradient_clip_val"] == 12 and config["model"]["norm"] == "instance"
    assert config["schedule"]["patch"] == "whole" and config["plan"]["size"] == "full"
    assert load(tmp_path / "run/checkpoints/last.ckpt").window.mirror_axes == (
        (0, 1, 2) if data == "3d" else (0, 1)
    )
