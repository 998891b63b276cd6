"""Imported nnU-Net models: the same predictions as nnU-Net's, run folders that other commands take, refusals."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import exports, tiny
from helpers import nnunet_models as models

from medconv import config
from medconv.data.case import Case
from medconv.features.export.export import export
from medconv.features.export.job import ExportOptions
from medconv.features.nnunet import command
from medconv.features.nnunet.import_model import import_model
from medconv.inference.predictor import Predictor
from medconv.training import run
from medconv.training.run_dir import RunDir
from medconv.utils.exit_codes import USER

REFERENCE = Path(__file__).with_name("nnunet_2.8.1.npz")
Arrays = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model folders and the run folders made of them, by name: NAME and runs/NAME."""
    folder = tmp_path_factory.mktemp("nnunet")
    for name in models.NAMES:
        import_model(models.write_model(folder / name, name), folder / "runs" / name)
    return folder


def _checkpoint(folder, name):
    return folder / "runs" / name / "fold0/checkpoints/best.ckpt"


def _check_same(predictor, images, expected):
    """The same prepared image, logits and label map. nnU-Net sums weighted logits in float16: at the corners
    of windows, where weights are below 1e-6, whole numbers are left of them.
    """
    case = predictor.read(Case("case", tuple(images)))
    scores = predictor.scores([case], keeps_logits=True)[0]
    axis = predictor.members[0].preprocessing.slice_axis
    assert case.arrays[0].shape == expected["image"].shape
    np.testing.assert_allclose(case.arrays[0], expected["image"], atol=1e-5)
    difference = np.abs(scores.logits[0].numpy() - expected["logits"]).ravel()
    assert np.quantile(difference, 0.5) < 0.002, axis
    assert np.quantile(difference, 0.9) < 0.02
    label = predictor.answer(scores)
    assert label.shape == expected["label"].shape
    assert (label != expected["label"]).mean() < 0.005
    assert len(np.unique(expected["label"])) == 3


@pytest.mark.parametrize("name", models.NAMES)
def test_predictions_are_those_of_nnunet(folder, tmp_path, name):
    with np.load(REFERENCE) as content:
        expected = {key.partition(".")[2]: content[key] for key in content if key.startswith(f"{name}.")}
    predictor = Predictor.load([_checkpoint(folder, name)])
    _check_same(predictor, models.write_image(tmp_path, name), expected)


@pytest.mark.parametrize("name", models.NAMES)
def test_predictions_are_those_of_nnunet_where_it_is_installed(folder, tmp_path, name):
    pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; it needs an environment of its own")
    images = models.write_image(tmp_path, name)
    expected = models.predicted(folder / name, images)
    _check_same(Predictor.load([_checkpoint(folder, name)]), images, expected)


def _dataset(root, name):
    """Three cases in nnU-Net's layout, with the labels that nnU-Net predicted."""
    with np.load(REFERENCE) as content:
        label = content[f"{name}.label"]
    (root / "labelsTr").mkdir(parents=True)
    for number, case in enumerate("abc"):
        for path in models.write_image(root / "imagesTr", name):
            image = nib.load(path)
            affine = image.affine
            voxels = image.get_fdata(dtype=np.float32)
            voxels[np.unravel_index(voxels.argmax(), voxels.shape)] += (
                1e-3 * number
            )  # else copies of one image
            nib.save(nib.Nifti1Image(voxels, affine), path)
            path.rename(path.with_name(path.name.replace(name, case)))
        nib.save(nib.Nifti1Image(label.astype(np.uint8), affine), root / f"labelsTr/{case}.nii.gz")
    (root / "dataset.json").write_text(json.dumps(models.dataset_json(name)))
    return root


@pytest.mark.parametrize("name", ["turned", "slices", "residual"])
def test_training_goes_on_from_the_imported_weights(folder, tmp_path, name):
    """With a learning rate of 0 the run predicts what the imported network predicts."""
    data, searched = _dataset(tmp_path / "data", name), folder / "runs" / name / "fold0"
    overrides = [
        f"hydra.searchpath=[file://{searched}]",
        "experiment=finetune",
        f"data.root={data}",
        "data.num_folds=3",
        f"data.cache_dir={tmp_path / 'prepared'}",
        "data.num_workers=0",
        "optimizer.lr=0",
        "logger=none",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=1",
        "trainer.check_val_every_n_epoch=1",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.enable_progress_bar=false",
        f"run.dir={tmp_path / 'run'}",
    ]
    checked = config.validate(tiny.composed(*overrides))
    summary = run.train(checked, RunDir.of(checked, {}))
    assert summary["steps"] == 1 and summary["val/dice"] > 0.97  # of the label map of nnU-Net itself
    image = models.write_image(tmp_path, name)
    trained = Predictor.load([tmp_path / "run/checkpoints/best.ckpt"])
    np.testing.assert_array_equal(trained(*image), Predictor.load([_checkpoint(folder, name)])(*image))
    assert (
        trained.members[0].preprocessing
        == Predictor.load([_checkpoint(folder, name)]).members[0].preprocessing
    )


def test_an_exported_network_predicts_the_same(folder, tmp_path):
    checkpoint, image = _checkpoint(folder, "thick"), models.write_image(tmp_path, "thick")
    export(checkpoint, tmp_path / "model.ts", ExportOptions("torchscript"))
    exported = Predictor([exports.read_back(tmp_path / "model.ts", "torchscript")])
    assert exported.members[0].preprocessing == Predictor.load([checkpoint]).members[0].preprocessing
    np.testing.assert_array_equal(exported(*image), Predictor.load([checkpoint])(*image))
    with pytest.raises(ValueError, match="a bundle is for axes that are turned, this network has data.conv"):
        export(checkpoint, tmp_path / "bundle", ExportOptions("bundle"))


def test_networks_of_different_axes_give_no_mean(folder, tmp_path):
    model = Predictor.load([_checkpoint(folder, "turned")]).members[0]
    turned = replace(model, preprocessing=replace(model.preprocessing, convention="nnunet_ras"))
    with pytest.raises(ValueError, match="different conventions"):
        Predictor([model, turned])(*models.write_image(tmp_path, "turned"))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected a trained nnU-Net v2 .* fold_N/checkpoint_final.pth"):
        import_model(tmp_path, tmp_path / "runs")
    model = models.write_model(tmp_path / "model", "slices")
    with pytest.raises(ValueError, match=r"with fold_3/checkpoint_final.pth"):
        import_model(model, tmp_path / "runs", ["0", "3"])
    (tmp_path / "runs/fold0").mkdir(parents=True)
    with pytest.raises(ValueError, match="runs/fold0: exists already"):
        import_model(model, tmp_path / "runs")


class Payload:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("payload"),)


def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = models.write_model(tmp_path / "model", "slices")
    file = model / "fold_0/checkpoint_final.pth"
    torch.save({**torch.load(file, weights_only=False), "logging": Payload()}, file)
    with pytest.raises(ValueError, match="refused, it holds more than tensors and plain values"):
        import_model(model, tmp_path / "runs")
    assert not (tmp_path / "payload").exists() and not (tmp_path / "runs").exists()


def test_weights_of_another_network_are_refused(tmp_path):
    model = models.write_model(tmp_path / "model", "slices")
    plans = models.plans("slices")
    plans["configurations"]["base"]["UNet_base_num_features"] = 6
    (model / "plans.json").write_text(json.dumps(plans))
    with pytest.raises(ValueError, match="checkpoint_final.pth: its weights do not fit its plans"):
        import_model(model, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_folds_and_checkpoint_have_defaults():
    options = command.parser().parse_args(["model", "--output", "runs/m"])
    assert (options.folder, options.output) == (Path("model"), Path("runs/m"))
    assert options.folds is None and options.checkpoint == "checkpoint_final.pth"
    assert command.parser().parse_args(["m", "--output", "o", "--folds", "0", "all"]).folds == ["0", "all"]


def test_folder_and_checkpoint_reach_the_import(tmp_path, monkeypatch, capsys):
    words = ("import-nnunet", tmp_path / "model", "--output", tmp_path / "out", "--checkpoint", "mine.pth")
    assert tiny.call(monkeypatch, *words) == USER
    error = capsys.readouterr().err
    assert str(tmp_path / "model") in error and "mine.pth" in error
    assert not (tmp_path / "out").exists()
