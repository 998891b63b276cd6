"""`init.pretrained` of nnU-Net or nnssl: network, preprocessing and weights are its own; what is refused."""

import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import nnunet_models as models
from helpers import tiny
from helpers.hub import serving

from medconv import config
from medconv.features.nnunet.import_model import import_model
from medconv.features.nnunet.pretrained import find
from medconv.inference.predictor import Predictor
from medconv.training import run
from medconv.training.run_dir import RunDir
from medconv.training.weight_source import weight_source


def _dataset(root, name, labels):
    """Three cases in nnU-Net's layout; the last class is where the image is bright, the others at random."""
    (root / "labelsTr").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for seed, case in enumerate("abc"):
        for image in models.write_image(root / "imagesTr", name, seed):
            read = nib.load(image)
            image.rename(image.with_name(image.name.replace(name, case)))
        label = rng.integers(0, len(labels), read.shape).astype(np.uint8)
        nib.save(nib.Nifti1Image(label, read.affine), root / f"labelsTr/{case}.nii.gz")
    (root / "dataset.json").write_text(json.dumps(models.dataset_json(name) | {"labels": labels}))
    return root


def _config(pretrained, *more):
    overrides = [
        "data=nnunet",
        f"init.pretrained={pretrained}",
        "data.num_folds=3",
        "data.num_workers=0",
        "optimizer.lr=0",
        "logger=none",
        "weight_averaging=none",
        "trainer.max_steps=1",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.enable_progress_bar=false",
        *more,
    ]
    return config.validate(tiny.composed(*overrides))


def with_plans(settings):
    """As `run.prepare` does before it reads data."""
    return weight_source(str(settings.init.pretrained)).settings(settings)


def _train(pretrained, data, folder, *more):
    paths = (f"data.root={data}", f"data.cache_dir={folder}/prepared", f"run.dir={folder}/run")
    checked = _config(pretrained, *paths, *more)
    run.train(checked, RunDir.of(checked, {}))
    return Predictor.load([folder / "run/checkpoints/best.ckpt"], mirror_axes=())


@pytest.mark.parametrize("name", ["turned", "residual"])
def test_a_run_begins_as_the_network_that_nnunet_trained(tmp_path, name, caplog):
    """With a learning rate of 0, it predicts what the imported model predicts."""
    model = models.write_model(tmp_path / "model", name)
    data = _dataset(tmp_path / "data", name, {"background": 0, "core": 1, "rim": 2})
    with caplog.at_level(logging.INFO):
        trained = _train(model, data, tmp_path)
    assert f"fold_0 of Dataset001_{name} by nnUNetTrainer sets data.spatial_dims=3, " in caplog.text
    (checkpoint,) = import_model(model, tmp_path / "imported")
    imported = Predictor.load([checkpoint], mirror_axes=())
    # Intensities are not used by these normalisations.
    prepared = [replace(one.members[0].preprocessing, intensities=()) for one in (trained, imported)]
    assert prepared[0] == prepared[1]
    image = models.write_image(tmp_path, name)
    np.testing.assert_array_equal(trained(*image), imported(*image))


def test_other_classes_get_a_new_head(tmp_path, caplog):
    """Also if there are as many, for one fold of several, and while all else is frozen."""
    model = models.write_model(tmp_path / "model", "turned")
    data = _dataset(tmp_path / "data", "turned", {"background": 0, "a": 1, "b": 2})
    with caplog.at_level(logging.INFO):
        _train(model / "fold_0", data, tmp_path, "init.freeze=[encoder,decoder,up]")
    assert "2 randomly initialised (head.weight, head.bias)" in caplog.text
    assert "init.freeze: 28 of 30 parameters" in caplog.text


def test_images_of_more_channels_are_taken(tmp_path, caplog):
    """The first convolution is adapted to them."""
    model = models.write_model(tmp_path / "model", "turned")
    data = _dataset(tmp_path / "data", "thick", {"background": 0, "core": 1, "rim": 2})
    with caplog.at_level(logging.INFO):
        trained = _train(model, data, tmp_path)
    assert len(trained.members[0].modalities) == 2
    assert "30 of 30 tensors loaded, 1 of them reshaped" in caplog.text


def test_what_a_user_sets_stays(tmp_path):
    model = models.write_model(tmp_path / "model", "thick")
    planned = with_plans(_config(model))
    assert planned.data.convention == "nnunet" and planned.data.spacing_mm == [1.0, 1.0, 4.0]
    assert planned.data.normalisation == ["ct", "zscore"] and len(planned.data.intensities) == 2
    assert planned.plan.channels == list(models.CHANNELS) and planned.plan.size == "large"
    assert planned.model["strided"] and planned.model["norm"] == "instance"
    kept = with_plans(_config(model, "data.spacing_mm=[2,2,2]", "data.normalisation=zscore"))
    assert kept.data.spacing_mm == [2, 2, 2] and kept.data.normalisation == "zscore"
    one_name = with_plans(_config(models.write_model(tmp_path / "turned", "turned")))
    assert one_name.data.normalisation == "zscore_nonzero"  # for any number of channels


def test_a_file_of_nnssl_sets_network_spacing_and_normalisation(tmp_path, caplog):
    """Its encoder is loaded, its decoder is not there, and the head is new."""
    architecture = models.plans("residual")["configurations"]["base"]["architecture"]
    network = {"arch_class_name": "ResidualEncoderUNet", "arch_kwargs": architecture["arch_kwargs"]}
    state = {n: v for n, v in models.state_dict("residual", 1).items() if n.startswith("encoder")}
    path = models.write_nnssl(tmp_path / "checkpoint_final.pth", network, state)
    data = _dataset(tmp_path / "data", "residual", {"background": 0, "core": 1, "rim": 2})
    with caplog.at_level(logging.INFO):
        trained = _train(path, data, tmp_path).members[0]
    assert (
        f"init.pretrained={path}: ResidualEncoderUNet, pretrained on Dataset745_OpenMind, sets "
        "data.spatial_dims=3, data.normalisation=zscore, data.spacing_mm=[2.0,1.5,1.0], plan.strides="
    ) in caplog.text
    assert trained.preprocessing.spacing_mm == (2.0, 1.5, 1.0)
    weight = trained.network.get_parameter("encoder.1.0.convs.0.weight")
    kernel = state["encoder.stages.1.blocks.0.conv1.conv.weight"]
    assert torch.equal(weight.cpu(), kernel.permute(0, 1, 4, 3, 2))
    kept = with_plans(_config(path, "data.spacing_mm=[2,2,2]", "data.normalisation=rescale"))
    assert kept.data.spacing_mm == [2, 2, 2] and kept.data.normalisation == "rescale"


def test_a_file_of_nnssl_may_be_on_the_hub(tmp_path, monkeypatch):
    """As the folder of its fold has it there: its plan is found, and another pickle is no code."""
    architecture = models.plans("residual")["configurations"]["base"]["architecture"]
    network = {"arch_class_name": "ResidualEncoderUNet", "arch_kwargs": architecture["arch_kwargs"]}
    state = {n: v for n, v in models.state_dict("residual", 1).items() if n.startswith("encoder")}
    path = models.write_nnssl(tmp_path / "checkpoint_final.pth", network, state)
    name = "hf://lab/heart/fold_all/checkpoint_final.pth"
    with serving(path.read_bytes(), tmp_path / "cache", monkeypatch):
        planned = with_plans(_config(name))
        assert planned.data.spacing_mm == [2.0, 1.5, 1.0]
        source = find(name)
    assert source is not None
    assert source.name == name
    other = serving(pickle.dumps(Path("/")), tmp_path / "other", monkeypatch)
    with other, pytest.raises(ValueError, match=r"checkpoint_final\.pth"):
        find(name)


def test_files_and_random_weights_are_left_alone(tmp_path):
    model = models.write_model(tmp_path / "model", "turned")
    file = _config(model / "fold_0/checkpoint_final.pth")
    assert with_plans(file) is file and find(str(file.init.pretrained)) is None


def test_a_folder_that_is_gone_is_named(tmp_path, caplog):
    """A run that it began refuses to resume, since the plans are missing; a file is not needed any more."""
    gone = _config(tmp_path / "gone")
    assert with_plans(gone) is gone
    assert f"init.pretrained={tmp_path / 'gone'}: no such file or folder; only a stopped run" in caplog.text
    caplog.clear()
    with_plans(_config("hf://owner/name/weights.safetensors"))  # a file of the Hub is not here yet
    assert "no such file" not in caplog.text


def test_weights_of_the_hub_are_no_missing_folder(caplog):
    remote = _config("hf://OWNER/NAME/model.safetensors")
    assert with_plans(remote) is remote
    assert not caplog.text


@pytest.mark.parametrize(
    ("more", "missing", "expected"),
    [
        (
            (),
            "plans.json",
            "a folder must be that of a trained nnU-Net v2 configuration, with plans.json, da",
        ),
        ((), "fold_0/checkpoint_final.pth", "and fold_N/checkpoint_final.pth"),
        (("model=segresnet",), "", "is one of model=customconv or resenc, got monai.networks.nets.SegResNet"),
    ],
)
def test_what_cannot_be_taken_is_named(tmp_path, more, missing, expected):
    model = models.write_model(tmp_path / "model", "turned")
    if missing:
        (model / missing).unlink()
    with pytest.raises(config.ConfigError, match=f"^init.pretrained={model}: .*{expected}"):
        with_plans(_config(model, *more))
