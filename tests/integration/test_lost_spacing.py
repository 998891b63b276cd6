"""Volumes whose headers all say 1 x 1 x 1 mm, though their slices are few, are planned as those of thick slices."""

import json

import nibabel as nib
import numpy as np
import torch
from helpers import tiny

from medconv.training import data_setup

SHAPE = (60, 60, 10)
TRUE_MM = [1.5, 1.5, 10.0]


def write(root, spacing_mm):
    """Hearts seen from far away: a ball in mm, in slices of 10 mm; the header says what it is told."""
    dataset = tiny.write_dataset(root, cases=5, shape=SHAPE)
    for index in range(5):
        label = np.zeros(SHAPE, np.uint8)
        label[20:40, 20 + index : 40, 2:8] = 1
        label[26:34, 26:34, 3:7] = 2
        image = np.random.default_rng(index).normal(0, 0.2, SHAPE) + label
        affine = np.diag([*spacing_mm, 1.0])
        nib.save(nib.Nifti1Image(image.astype(np.float32), affine), dataset / f"imagesTr/case_{index}.nii.gz")
        nib.save(nib.Nifti1Image(label, affine), dataset / f"labelsTr/case_{index}.nii.gz")
    return dataset


def planned(dataset, *overrides):
    return data_setup.prepare_data(tiny.checked(dataset, *overrides)).plan


def test_the_plan_is_that_of_true_headers(tmp_path):
    lost = planned(write(tmp_path / "lost/data", [1.0, 1.0, 1.0]))
    true = planned(write(tmp_path / "true/data", TRUE_MM))
    insisted = planned(write(tmp_path / "insisted/data", [1.0, 1.0, 1.0]), "data.source_spacing_mm=[1,1,1]")
    assert (lost.patch_size, lost.strides, lost.kernel_sizes) == (
        true.patch_size,
        true.strides,
        true.kernel_sizes,
    )
    assert lost.kernel_sizes != insisted.kernel_sizes
    in_voxels = [mm / stated for mm, stated in zip(lost.spacing_mm, (1, 1, 7), strict=True)]
    assert in_voxels == [mm / stated for mm, stated in zip(true.spacing_mm, TRUE_MM, strict=True)]


def test_a_run_keeps_the_spacing_that_was_assumed_and_predicts_with_it(tmp_path, monkeypatch, caplog):
    dataset = write(tmp_path / "data", [1.0, 1.0, 1.0])
    tiny.train(dataset, tmp_path / "run")
    assert "so 1 x 1 x 7 mm is taken in its place" in caplog.text
    checkpoint = tmp_path / "run/checkpoints/best.ckpt"
    config = torch.load(checkpoint, weights_only=True)["medconv"]["config"]
    assert config["data"]["source_spacing_mm"] == [1.0, 1.0, 7.0]
    tiny.train(dataset, tmp_path / "run")  # resumes: the same data are the same run
    images = dataset / "imagesTr"
    predicting = ("--checkpoint", checkpoint, "--input", images, "--output", tmp_path / "out")
    assert tiny.call(monkeypatch, "predict", *predicting) == 0
    settings = json.loads((tmp_path / "out/prediction.json").read_text())["settings"]
    assert settings["source_spacing_mm"] == [1.0, 1.0, 7.0]
