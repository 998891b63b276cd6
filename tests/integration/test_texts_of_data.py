"""Texts of data files, such as class names, stay texts: none is read as an interpolation of the config."""

import json

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import nnunet_models, picture_tables, tiny

from medconv import config
from medconv.features.nnunet.import_model import import_model
from medconv.training import run
from medconv.training.run_dir import RunDir

SECRET = "value-of-the-environment"
HOSTILE = ("${oc.env:MEDCONV_TEST_SECRET}", "${oc.create:{_target_:os.system,command:ls}}", "a${b", "${seed}")
MISSING = "???"  # as OmegaConf writes a value that is missing


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("MEDCONV_TEST_SECRET", SECRET)


def assert_no_secret(*folders):
    for folder in folders:
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert files
        for file in files:
            assert SECRET.encode() not in file.read_bytes(), file


def export(monkeypatch, checkpoint, folder, *formats):
    folder.mkdir()
    for name in formats:
        arguments = ("--checkpoint", checkpoint, "--format", name, "--output", folder / name)
        assert tiny.call(monkeypatch, "export", *arguments) == 0


def test_classes_of_a_dataset_json_keep_their_names(tmp_path, monkeypatch):
    dataset = tiny.write_dataset(tmp_path / "data")
    names = (*HOSTILE, MISSING, "1e3")
    for path in (dataset / "labelsTr").iterdir():
        image = nib.load(path)
        label = np.asarray(image.dataobj).copy()
        label[label > 0] = 1 + np.arange(np.count_nonzero(label)) % len(names)
        nib.save(nib.Nifti1Image(label, image.affine), path)
    meta = json.loads((dataset / "dataset.json").read_text())
    meta["labels"] = {str(value): name for value, name in enumerate(("background", *names))}
    (dataset / "dataset.json").write_text(json.dumps(meta))

    summary = tiny.train(dataset, tmp_path / "run")
    assert list(summary["val/dice_per_class"]) == list(names)
    settings = tiny.checked(dataset, f"run.dir={tmp_path / 'run'}")
    again = run.train(settings, RunDir.of(settings, {}))  # reads config.yaml and the checkpoint
    assert again["status"] == "done"

    checkpoint = tmp_path / "run/checkpoints/best.ckpt"
    predicting = ("--checkpoint", checkpoint, "--input", dataset / "imagesTr", "--output", tmp_path / "out")
    assert tiny.call(monkeypatch, "predict", *predicting) == 0
    export(monkeypatch, checkpoint, tmp_path / "exports", "safetensors", "bundle", "torchscript")
    assert names[0] in (tmp_path / "exports/safetensors/README.md").read_text()
    assert_no_secret(tmp_path / "run", tmp_path / "prepared", tmp_path / "out", tmp_path / "exports")


def test_regions_of_nnunets_dataset_json_keep_their_names(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data")
    meta = json.loads((dataset / "dataset.json").read_text())
    for entry in meta["training"]:
        image = dataset / entry["image"]
        image.rename(image.with_name(image.name.replace(".nii.gz", "_0000.nii.gz")))
    regions = {"background": 0, HOSTILE[0]: [1, 2], HOSTILE[1]: 2}
    nnunet = {"channel_names": {"0": "MRI"}, "labels": regions, "regions_class_order": [1, 2]}
    files = {"numTraining": meta["numTraining"], "file_ending": ".nii.gz"}
    (dataset / "dataset.json").write_text(json.dumps(nnunet | files))

    summary = tiny.train(dataset, tmp_path / "run", "data=nnunet")
    assert list(summary["val/dice_per_class"]) == list(HOSTILE[:2])
    assert_no_secret(tmp_path / "run", tmp_path / "prepared")


def test_classes_of_a_table_keep_their_names(tmp_path, monkeypatch):
    table = picture_tables.write(tmp_path / "data", count=24)
    lines = ["path,label"]
    lines += [f'{index}.png,"{HOSTILE[index % 4]}"' for index in range(24)]
    table.write_text("\n".join(lines))
    folder = tmp_path / "run"
    checked = picture_tables.checked(
        table, "model=encoder", "trainer.max_steps=2", "trainer.precision=32-true", f"run.dir={folder}"
    )
    run.train(checked, RunDir.of(checked, {}))
    checkpoint = folder / "checkpoints/best.ckpt"
    targets = torch.load(checkpoint, weights_only=True)["medconv"]["config"]["derived"]["targets"]
    assert sorted(targets["names"]) == sorted(HOSTILE)
    predicting = ("--checkpoint", checkpoint, "--input", table, "--output", tmp_path / "answers")
    assert tiny.call(monkeypatch, "predict", *predicting) == 0
    assert HOSTILE[0] in (tmp_path / "answers/predictions.csv").read_text()
    export(monkeypatch, checkpoint, tmp_path / "exports", "safetensors")
    assert_no_secret(tmp_path)


def test_classes_of_an_imported_model_keep_their_names(tmp_path, monkeypatch):
    model = nnunet_models.write_model(tmp_path / "model", "turned")
    meta = json.loads((model / "dataset.json").read_text())
    meta["labels"] = {"background": 0, HOSTILE[0]: 1, HOSTILE[2]: 2}
    (model / "dataset.json").write_text(json.dumps(meta))
    import_model(model, tmp_path / "runs")
    checkpoint = tmp_path / "runs/fold0/checkpoints/best.ckpt"
    assert HOSTILE[0] in (tmp_path / "runs/fold0/config.yaml").read_text()
    export(monkeypatch, checkpoint, tmp_path / "exports", "safetensors")
    assert_no_secret(tmp_path / "runs", tmp_path / "exports")


def test_interpolations_in_foreign_plans_are_refused(tmp_path):
    model = nnunet_models.write_model(tmp_path / "model", "turned")
    plans = json.loads((model / "plans.json").read_text())
    plans["configurations"]["turned"]["batch_size"] = HOSTILE[0]
    (model / "plans.json").write_text(json.dumps(plans))
    with pytest.raises(ValueError, match=r"plans\.json \(invalid literal"):
        import_model(model, tmp_path / "runs")
    assert not list(tmp_path.glob("runs/**/*.ckpt"))


@pytest.mark.parametrize("text", [*HOSTILE, MISSING])
def test_arguments_of_a_class_are_no_interpolations(text):
    """A loss is given the names of classes."""
    node = {
        "_target_": "builtins.dict",
        "names": [text],
        "nested": {"_target_": "builtins.dict", "name": text},
    }
    assert config.build(node, "loss") == {"names": [text], "nested": {"name": text}}
