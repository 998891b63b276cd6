"""`medconv predict` in this process: its files, and errors that a user may see."""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import members
from helpers.members import call

from medconv.inference import predict
from medconv.inference.predictor import Predictor


def voxels(path):
    return np.asarray(nib.load(path).dataobj)


STALE = ("quality", "case_0.json"), ("uncertainty", "case_0.nii.gz")


def test_label_maps_probabilities_and_a_manifest_are_written(exported, tmp_path, monkeypatch):
    images, checkpoint, _ = exported
    other = members.variant(checkpoint, tmp_path / "other.ckpt")
    output = tmp_path / "out"
    assert (
        call(
            monkeypatch, checkpoint, images, "--output", output, "--save-probabilities", "--checkpoint", other
        )
        == 0
    )
    record = json.loads((output / "prediction.json").read_text())
    assert record["class_names"] == ["background", "box", "hole"] and record["targets"]["names"] == [
        "box",
        "hole",
    ]
    assert record["checkpoint"] == str(checkpoint) and record["checkpoints"] == [str(checkpoint), str(other)]
    assert record["settings"]["overlap"] == [0.5, 0.5] and len(record["settings"]["checkpoints"]) == 2
    predictor = Predictor.load([checkpoint, other])
    for i in range(7):
        image, label, chances = (
            nib.load(p / f"case_{i}.nii.gz") for p in (images, output, output / "probabilities")
        )
        np.testing.assert_array_equal(np.asarray(label.dataobj), predictor(images / f"case_{i}.nii.gz"))
        assert chances.shape == (*image.shape, 3) and chances.get_data_dtype() == np.float32
        np.testing.assert_array_equal(chances.affine, image.affine)
        np.testing.assert_array_equal(np.asarray(chances.dataobj).argmax(-1), np.asarray(label.dataobj))
        assert record["cases"][f"case_{i}"]["images"] == [str(images / f"case_{i}.nii.gz")]


def test_training_cases_among_the_images_cause_a_warning_and_are_in_the_manifest(
    exported, tmp_path, monkeypatch, capsys
):
    """A later call for other images keeps those of the earlier ones."""
    images, checkpoint, _ = exported
    held_out = torch.load(checkpoint, weights_only=True)["medconv"]["validation"]
    trained = [case for case in (f"case_{i}" for i in range(7)) if case not in held_out]
    assert len(trained) == 4
    one = images / f"{min(held_out)}.nii.gz"
    manifest = tmp_path / "out/prediction.json"
    assert call(monkeypatch, checkpoint, images, "--output", manifest.parent) == 0
    named = f"cases with names of training cases: 4 of 7 ({trained[0]}, {trained[1]} and 2 more)"
    assert named in capsys.readouterr().out
    assert json.loads(manifest.read_text())["train_cases"] == trained
    assert call(monkeypatch, checkpoint, one, "--output", manifest.parent) == 0
    assert json.loads(manifest.read_text())["train_cases"] == trained
    assert call(monkeypatch, checkpoint, one, "--output", tmp_path / "one") == 0
    assert json.loads((tmp_path / "one/prediction.json").read_text())["train_cases"] == []


def test_a_warning_of_several_cases_is_said_once_and_counted(exported, tmp_path, monkeypatch, capsys):
    images, checkpoint, _ = exported
    for case in ("a", "b", "c"):
        image = nib.load(images / "case_0.nii.gz")
        flat = nib.Nifti1Image(np.zeros(image.shape, np.float32), image.affine)
        (tmp_path / "flat").mkdir(exist_ok=True)
        nib.save(flat, tmp_path / f"flat/{case}.nii.gz")
    assert call(monkeypatch, checkpoint, tmp_path / "flat", "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.count("a channel is constant") == 2
    assert "case a: a channel is constant" in printed and "2 more cases (b, c): a channel is" in printed


def test_quality_is_the_agreement_of_the_networks(exported, tmp_path, monkeypatch, capsys):
    """The networks' own label maps give Dice and volumes, the mean probabilities the uncertainty."""
    images, checkpoint, _ = exported
    paths = [checkpoint, *(members.variant(checkpoint, tmp_path / f"{i}.ckpt", seed=i) for i in (1, 2))]
    output, image = tmp_path / "out", images / "case_0.nii.gz"
    words = ["--output", output, "--save-probabilities", "--checkpoint", *paths[1:]]
    assert call(monkeypatch, checkpoint, image, *words, "--quality") == 0
    labels = [Predictor.load([path])(image) for path in paths]
    predictor = Predictor.load(paths[:1])
    content = json.loads((output / "quality/case_0.json").read_text())
    assert content["networks"] == 3 and set(content["classes"]) == {"box", "hole"}
    pairs = [predictor.targets.dice(labels[a], labels[b])["box"] for a, b in ((0, 1), (0, 2), (1, 2))]
    volumes = [(label == 1).sum() * np.prod(nib.load(image).header.get_zooms()) / 1000 for label in labels]
    box = content["classes"]["box"]
    assert box["dice"] == pytest.approx(np.mean(pairs)) and 0 < box["lowest_dice"] < 1
    assert box["lowest_dice"] == min(pairs) and box["volume_ml"] == pytest.approx(np.mean(volumes))
    assert box["volume_sd_ml"] == pytest.approx(np.std(volumes, ddof=1)) and box["volume_sd_ml"] > 0
    chances = nib.load(output / "probabilities/case_0.nii.gz").get_fdata()
    entropy = -(chances * np.log(np.maximum(chances, 1e-30))).sum(-1) / np.log(3)
    uncertainty = nib.load(output / "uncertainty/case_0.nii.gz").get_fdata()
    np.testing.assert_allclose(uncertainty[..., 0], entropy, atol=1e-5)
    assert call(monkeypatch, checkpoint, image, *words) == 1
    assert "quality: True there, None now" in capsys.readouterr().err
    metrics = tmp_path / "metrics.json"
    lines = {"box": {"calibration": [0.5, 0.25]}, "hole": {"calibration": None}}
    metrics.write_text(json.dumps({"quality": {"per_class": lines}}))
    calibrate = ["--calibration", metrics]
    assert call(monkeypatch, checkpoint, image, *words, *calibrate) == 1
    assert "--calibration turns what --quality measures into Dice" in capsys.readouterr().err
    assert call(monkeypatch, checkpoint, image, *words, "--quality", *calibrate, "--overwrite") == 0
    classes = json.loads((output / "quality/case_0.json").read_text())["classes"]
    assert classes["box"] == {**box, "expected_dice": pytest.approx(0.5 * box["dice"] + 0.25)}
    assert classes["hole"]["expected_dice"] is None
    assert "no calibration of hole, there were too few cases" in capsys.readouterr().out
    assert call(monkeypatch, checkpoint, image, *words, "--overwrite") == 0
    assert not any((output / name / file).exists() for name, file in STALE)


def test_quality_of_one_network_is_how_sure_it_is(exported, tmp_path, monkeypatch, capsys):
    """The soft Dice of its probabilities and its own label map; a calibration of agreement is refused."""
    images, checkpoint, _ = exported
    output, image = tmp_path / "out", images / "case_0.nii.gz"
    words = ["--output", output, "--save-probabilities", "--quality"]
    assert call(monkeypatch, checkpoint, image, *words) == 0
    chances = nib.load(output / "probabilities/case_0.nii.gz").get_fdata()
    label = np.asarray(nib.load(output / "case_0.nii.gz").dataobj)
    content = json.loads((output / "quality/case_0.json").read_text())
    assert content["networks"] == 1 and content["method"] == "soft_dice_confidence"
    for value, name in ((1, "box"), (2, "hole")):
        probability, mask = chances[..., value].reshape(label.shape), label == value
        expected = 2 * probability[mask].sum() / (probability.sum() + mask.sum()) if mask.any() else None
        assert content["classes"][name]["dice"] == pytest.approx(expected, abs=1e-5)
    assert (output / "uncertainty/case_0.nii.gz").exists()
    metrics = tmp_path / "metrics.json"
    lines = {name: {"calibration": [0.5, 0.25]} for name in ("box", "hole")}
    metrics.write_text(json.dumps({"quality": {"per_class": lines}}))
    assert call(monkeypatch, checkpoint, image, *words, "--calibration", metrics, "--overwrite") == 1
    assert "calibration is of pairwise_dice, these predictions have soft_dice_" in capsys.readouterr().err
    metrics.write_text(json.dumps({"quality": {"method": "soft_dice_confidence", "per_class": lines}}))
    assert call(monkeypatch, checkpoint, image, *words, "--calibration", metrics, "--overwrite") == 0
    assert "expected_dice" in json.loads((output / "quality/case_0.json").read_text())["classes"]["box"]


@pytest.mark.parametrize("kind", ["txt", "json array", "json object"])
def test_the_cases_of_a_list_are_predicted(exported, tmp_path, monkeypatch, kind):
    shutil.copy(exported.images / "case_0.nii.gz", tmp_path / "near.nii.gz")
    far = str(exported.images / "case_1.nii.gz")
    source = tmp_path / ("list.txt" if kind == "txt" else "list.json")
    content = {"json array": ["near.nii.gz", [far]], "json object": {"first": "near.nii.gz", "second": [far]}}
    source.write_text(f"# two\nnear.nii.gz\n\n{far}\n" if kind == "txt" else json.dumps(content[kind]))
    assert call(monkeypatch, exported.checkpoint, source, "--output", tmp_path / "out") == 0
    names = {"first", "second"} if kind == "json object" else {"near", "case_1"}
    assert {path.name.removesuffix(".nii.gz") for path in (tmp_path / "out").glob("*.nii.gz")} == names


def test_cases_that_fail_are_named_and_the_others_are_predicted(exported, tmp_path, monkeypatch, capsys):
    """One runs out of memory, one meets a bug of our own; the next start predicts the missing ones."""
    images = tmp_path / "images"
    shutil.copytree(exported.images, images)
    (images / "case_1.nii.gz").write_bytes(b"damaged")
    array = voxels(exported.images / "case_2.nii.gz")
    nib.save(nib.Nifti1Image(np.stack([array, array], -1), np.eye(4)), images / "case_2.nii.gz")
    nib.save(nib.Nifti1Image(array[..., :1], np.eye(4)), images / "case_3.nii.gz")
    errors = [MemoryError("Unable to allocate 9 TiB"), TypeError("what?")]
    scores = Predictor.scores

    def failing(self, inputs, **options):
        if inputs[0].case.id in ("case_4", "case_5") and errors:
            raise errors.pop(0)
        return scores(self, inputs, **options)

    monkeypatch.setattr(Predictor, "scores", failing)
    monkeypatch.setattr("medconv.utils.progress.in_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert call(monkeypatch, exported.checkpoint, images, "--output", tmp_path / "out") == 1
    out, err = capsys.readouterr()
    assert "2 of 7 predictions are in" in out and "Traceback" in out + err
    for line in (
        "error: 5 of 7 cases could not be predicted",
        "  case case_1: ",
        f"  case case_2: {images}/case_2.nii.gz: the network was trained on 1 channel (MRI), found 2",
        f"  case case_3: {images}/case_3.nii.gz: the network is 3D, the image has shape (16, 18, 1)",
        "  case case_4: out of memory (MemoryError: Unable to allocate 9 TiB); try sw_batch_size=1, the CPU as "
        "the device, or fewer workers",
        "  case case_5: TypeError: what? (a bug in medconv, please report it with the lines above)",
    ):
        assert line in err
    assert {p.name for p in (tmp_path / "out").glob("*.nii.gz")} == {"case_0.nii.gz", "case_6.nii.gz"}
    for i in range(1, 6):
        shutil.copy(exported.images / f"case_{i}.nii.gz", images)
    assert call(monkeypatch, exported.checkpoint, images, "--output", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "7 of 7 predictions are in" in out and "5 new, 2 already there" in out
    assert "predicting" in err and "7/7" in err  # the bar also counts those that existed


def test_a_spacing_far_from_that_of_training_is_logged(exported, tmp_path, monkeypatch, capsys):
    path = tmp_path / "far.nii.gz"
    nib.save(nib.Nifti1Image(voxels(exported.images / "case_0.nii.gz"), np.diag([1.0, 1.5, 9.0, 1.0])), path)
    assert call(monkeypatch, exported.checkpoint, path, "--output", tmp_path / "out") == 0
    warning = (
        "warning: case far: its spacing, 1 x 1.5 x 9 mm (right, anterior, superior), is far from "
        "that of training"
    )
    assert warning in "".join(capsys.readouterr())


def test_a_header_that_must_be_wrong_costs_its_own_case_alone(exported, tmp_path, monkeypatch, capsys):
    images = tmp_path / "images"
    images.mkdir()
    shutil.copy(exported.images / "case_0.nii.gz", images)
    array = voxels(exported.images / "case_1.nii.gz")
    for name, mm in (("large", 100), ("small", 0.001)):
        nib.save(nib.Nifti1Image(array, np.diag([mm, mm, mm, 1.0])), images / f"{name}.nii.gz")
    assert call(monkeypatch, exported.checkpoint, images, "--output", tmp_path / "out") == 1
    out, err = capsys.readouterr()
    assert "2 of 3 cases could not be predicted" in err
    assert f"case large: {images / 'large.nii.gz'}: 16 x 18 x 12 voxels of 100 x 100 x 100 mm" in err
    assert f"case small: {images / 'small.nii.gz'}: 16 x 18 x 12 voxels of 0.001 x 0.001 x 0.001 mm" in err
    assert "memory: about" not in out + err
    assert [path.name for path in (tmp_path / "out").glob("*.nii.gz")] == ["case_0.nii.gz"]
    spacing = ["--source-spacing-mm", "1", "1.5", "2"]
    assert call(monkeypatch, exported.checkpoint, images, "--output", tmp_path / "stated", *spacing) == 0


def test_metaimage_is_read_and_written(exported, tmp_path, monkeypatch):
    sitk = pytest.importorskip("SimpleITK", reason="the extra `itk`")
    source = exported.images / "case_0.nii.gz"
    images = {}
    for suffix in (".nii.gz", ".mha"):
        folder = tmp_path / suffix
        folder.mkdir()
        sitk.WriteImage(sitk.ReadImage(str(source)), str(folder / f"case_0{suffix}"))
        assert call(monkeypatch, exported.checkpoint, folder, "--output", folder / "out") == 0
        images[suffix] = sitk.ReadImage(str(folder / f"out/case_0{suffix}"))
    assert (sitk.GetArrayFromImage(images[".mha"]) == sitk.GetArrayFromImage(images[".nii.gz"])).all()
    assert images[".mha"].GetOrigin() == pytest.approx(images[".nii.gz"].GetOrigin())
    assert images[".mha"].GetDirection() == pytest.approx(images[".nii.gz"].GetDirection())
    assert not list((tmp_path / ".mha/out").glob("*.nii.gz"))


def test_processes_of_a_launcher_take_different_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    assert predict.usable_device(None) == "cuda:0"
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        with monkeypatch.context() as started:
            started.setenv(variable, "6")
            started.setenv("SLURM_STEP_NUM_TASKS", "8")
            assert predict.usable_device(None) == "cuda:2"
            assert predict.usable_device("cuda:1") == "cuda:1"
