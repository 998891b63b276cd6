"""Models for nnU-Net: our importer and nnU-Net read them back and predict the same, and networks that do not fit."""

import json
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import loaded_models, nnunet_models, tiny
from torch import nn

from medconv.convs import swap_convs
from medconv.data.case import Case
from medconv.features.export.export import export
from medconv.features.export.job import ExportOptions
from medconv.features.nnunet.export import check_nnunet, mirrored_axes, prediction_notes
from medconv.features.nnunet.import_model import import_model
from medconv.inference.load import load
from medconv.inference.predictor import Predictor
from medconv.models.unet import UNet
from medconv.utils.errors import ArgumentError

NETWORKS = {
    "plain": ("model.norm=instance", "augmentation.mirror_axes=[0,1]", "task.mirror_axes=[0,1]"),
    "batch": ("data.normalisation=dataset",),
    "residual": ("model=resenc", "data.fold=1"),
    "ras": ("model.norm=instance", "data.convention=nnunet_ras", "data.spacing_mm=[1.2,1.2,1.5]"),
    "slices": (
        "data.spatial_dims=2",
        "data.slice_axis=0",
        "augmentation.mirror_axes=[0]",
        "task.mirror_axes=[0]",
    ),
}
OUTPUT = Path("Dataset007_Tiny")


@pytest.fixture(scope="module", params=NETWORKS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    dataset = tiny.write_dataset(folder / "data")
    settings = ("model.strided=true", *NETWORKS[request.param])
    tiny.train(dataset, folder / "run", *settings)
    export(
        folder / "run/checkpoints/best.ckpt",
        folder / OUTPUT,
        ExportOptions("nnunet", case=dataset / "imagesTr/case_1.nii.gz"),
    )
    yield folder / "run/checkpoints/best.ckpt"


def _trained(checkpoint):
    """The folder of the exported configuration."""
    (folder,) = (checkpoint.parents[2] / OUTPUT).iterdir()
    return folder


def _odd_image(checkpoint, folder):
    """Other axes, another spacing, and zeros around the content."""
    volume = nib.load(checkpoint.parents[2] / "data/imagesTr/case_1.nii.gz")
    image = volume.get_fdata().astype(np.float32)
    affine = np.array([[0, -1.2, 0, 3], [1.3, 0, 0, 4], [0, 0, 1.7, 5], [0, 0, 0, 1]])
    path = folder / "odd_0000.nii.gz"
    nib.save(nib.Nifti1Image(np.pad(image, ((1, 2), (0, 3), (2, 0))), affine), path)
    return path


def test_our_importer_reads_the_same_model_back(checkpoint, tmp_path):
    (back,) = import_model(_trained(checkpoint), tmp_path / "runs")
    expected = Predictor.load([checkpoint])
    predictor = Predictor.load([back])
    (model,) = expected.members
    (model_back,) = predictor.members
    assert model_back.window == model.window and model_back.class_names == model.class_names
    assert replace(model_back.preprocessing, normalisation=(), intensities=()) == replace(
        model.preprocessing, normalisation=(), intensities=()
    )
    image = _odd_image(checkpoint, tmp_path)
    case = Case("odd", (image,))
    (scores,) = predictor.scores([predictor.read(case)], keeps_logits=True)
    (expected_scores,) = expected.scores([expected.read(case)], keeps_logits=True)
    np.testing.assert_allclose(scores.values, expected_scores.values, atol=1e-4)
    np.testing.assert_array_equal(predictor(image), expected(image))


def test_the_folder_is_named_as_nnunet_looks_for_it(checkpoint):
    folder = _trained(checkpoint)
    model = load(checkpoint, plain=True)
    configuration = "2d" if model.preprocessing.spatial_dims == 2 else "3d_fullres"
    assert folder.name == f"nnUNetTrainer__nnUNetPlans__{configuration}"
    fold = "1" if "residual" in checkpoint.parts[-4] else "0"
    assert (folder / f"fold_{fold}/checkpoint_final.pth").is_file()
    assert json.loads((folder / "plans.json").read_text())["dataset_name"] == OUTPUT.name
    (command,) = prediction_notes(model, checkpoint.parents[2] / OUTPUT)
    assert f"nnUNetv2_predict -d {OUTPUT} -c {configuration} -f {fold} -i IMAGES" in command


def test_nnunet_predicts_the_same_where_it_is_installed(checkpoint, tmp_path):
    pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; it needs an environment of its own")
    image = _odd_image(checkpoint, tmp_path)
    fold = next(_trained(checkpoint).glob("fold_*")).name.removeprefix("fold_")
    label = nnunet_models.predicted(_trained(checkpoint), [image], fold)["label"]
    differing = (label != Predictor.load([checkpoint])(image)).mean()
    # Without a convention medconv does not clip what it resamples, and places windows otherwise. Networks that
    # have trained for four steps are in doubt almost everywhere.
    assert differing < (0.001 if "ras" in checkpoint.parts[-4] else 0.01)


def _model(network):
    model = loaded_models.segmentation(network)
    return replace(model, path=Path("best.ckpt"))


def test_networks_that_do_not_fit_are_refused_with_what_would():
    strided = UNet(3, 1, 2, (4, 8), [2], strided=True, norm="instance")
    check_nnunet(_model(strided), OUTPUT)
    with pytest.raises(
        ArgumentError, match="^output .*hip: needs the name of an nnU-Net dataset, such as Da"
    ):
        check_nnunet(_model(strided), Path("hip"))
    with pytest.raises(ValueError, match=r"best.ckpt: its stages .* train with model.strided=true for Plain"):
        check_nnunet(_model(UNet(3, 1, 2, (4, 8), [2])), OUTPUT)
    with pytest.raises(ValueError, match="nnU-Net has no Net, expected PlainConvUNet .model=customconv. or"):
        check_nnunet(_model(tiny.Net(3, 1, 2, (4, 8), [2], strided=True)), OUTPUT)
    swap_convs(strided, _separable)
    with pytest.raises(
        ValueError, match=r"does not fold to the convolutions of nnU-Net \(encoder.0.*; conv=no"
    ):
        check_nnunet(_model(strided), OUTPUT)


def _separable(conv):
    return nn.Sequential(nn.Conv3d(conv.in_channels, conv.out_channels, 1), nn.Identity())


def test_labels_that_would_swap_are_not_mirrored(tmp_path):
    model = _model(UNet(3, 1, 2, (4, 8), [2], strided=True))
    window = replace(model.window, mirror_axes=(0, 1), overlap=0.25)
    model = replace(model, window=window)
    assert mirrored_axes(model) == (1, 2)
    paired = replace(model, window=replace(window, flip_label_pairs=((1, 2),)))
    assert mirrored_axes(paired) == (1,)
    (tmp_path / "nnUNetTrainer__nnUNetPlans__3d_fullres/fold_0").mkdir(parents=True)
    assert "-f 0 -step_size 0.75" in prediction_notes(model, tmp_path)[0]
    assert "cannot swap left and right labels" in prediction_notes(paired, tmp_path)[1]
