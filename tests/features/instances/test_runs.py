"""Objects from training to evaluation, as a user does: check, run, resume, prediction, scores, export."""

import json
import shutil

import numpy as np
import pytest
from helpers import tiny
from helpers.object_maps import discs, write_discs
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import medconv
from medconv.features.instances.objects import classes_of
from medconv.features.instances.targets import InstanceTargets
from medconv.utils import checkpoint_io


def words(root, folder, *more):
    """Of a run on the discs in a folder."""
    return [
        "data=instances",
        f"data.root={root}",
        "data.images=images",
        "data.labels=objects",
        f"data.cache_dir={root}/prepared",
        f"run.dir={root / folder}",
        *(word for word in tiny.SMALL if word.split("=")[0] not in {each.split("=")[0] for each in more}),
        *more,
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The discs, and a run on them."""
    root = write_discs(tmp_path_factory.mktemp("objects"))
    with pytest.MonkeyPatch.context() as patch:
        run = words(
            root,
            "run",
            "trainer.max_steps=40",
            "data.samples_per_epoch=40",
            "model.channels=[8,16]",
            "callbacks=default",
            "optimizer.lr=0.02",
        )
        assert tiny.call(patch, "train", *run) == 0
    return root


@pytest.fixture(scope="module")
def predictions(root):
    with pytest.MonkeyPatch.context() as patch:
        best = root / "run/checkpoints/best.ckpt"
        arguments = ("--checkpoint", best, "--input", root / "images", "--output", root / "predicted")
        assert tiny.call(patch, "predict", *arguments) == 0
    return root / "predicted"


def test_the_store_has_classes_and_validation_objects(root):
    summary = json.loads((root / "run/summary.json").read_text())
    assert 0 <= summary["val/ap"] <= summary["val/ap50"] <= 1
    assert summary["score"]["name"] == "val/ap"
    assert summary["val/reference_objects"] == 4 * len(summary["val/cases"])
    stored = np.load(next((root / "prepared").rglob("case_0.label.npy")))
    np.testing.assert_array_equal(np.sort(np.unique(stored)), [0, 1, 2])
    assert (stored == 1).sum() == (classes_of(discs()) == 1).sum()


def test_pictures_are_logged(root):
    events = EventAccumulator(str(root / "run/tensorboard"), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()["images"]
    assert any(tag.startswith("images/val/") for tag in tags)
    assert any(tag.startswith("images/train/sample") for tag in tags)


def test_predictions_have_a_value_for_each_object(root, predictions):
    objects = np.asarray(Image.open(predictions / "case_0.png"))
    assert sorted(np.unique(objects)) == list(range(int(objects.max()) + 1))
    assert objects.max() > 2
    answer = medconv.load(root / "run/checkpoints/best.ckpt")(root / "images/case_0.png")
    np.testing.assert_array_equal(answer[..., 0].T, objects)


def test_an_evaluation_of_folders(root, predictions, monkeypatch):
    """The table, the files and the page, compared with a copy whose objects are one."""
    merged = shutil.copytree(predictions, root / "merged")
    for path in merged.glob("*.png"):
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8)).save(path)
    output = root / "scores.json"
    folders = ("--predictions", predictions, "--references", root / "objects", "--output", output)
    assert tiny.call(monkeypatch, "evaluate", *folders, "--compare", merged) == 0
    result = json.loads(output.read_text())
    assert result["mean"]["reference_objects"] == 24
    assert result["comparison"]["ap50"]["difference"] > 0
    assert "Average precision by threshold" in output.with_suffix(".html").read_text()
    assert output.with_suffix(".csv").read_text().startswith("predictions,case,reference,predicted,ap50")
    table = medconv.evaluate(predictions, root / "objects")
    assert table.mean["ap50"] == result["mean"]["ap50"]


def test_a_line_by_hand_is_a_manifest_of_foreign_predictions(root, tmp_path):
    shutil.copytree(root / "objects", tmp_path / "foreign")
    (tmp_path / "foreign/prediction.json").write_text('{"targets": {"kind": "instances"}}')
    assert medconv.evaluate(tmp_path / "foreign", root / "objects").mean["ap"] == 1


def test_a_resumed_run_ends_with_the_same_scores(root, monkeypatch):
    constant = ["scheduler=constant", "weight_averaging=none", "schedule.patch=whole"]
    whole = words(root, "whole", *constant)
    half = words(root, "half", *constant, "trainer.max_steps=2")
    rest = words(root, "rest", *constant, f"run.resume={root}/half/checkpoints/last.ckpt")
    for run in (whole, half, rest):
        assert tiny.call(monkeypatch, "train", *run) == 0
    last = [
        checkpoint_io.read(root / name / "checkpoints/last.ckpt")["medconv"] for name in ("whole", "rest")
    ]
    assert last[0]["validation"] == last[1]["validation"]


def test_an_export_equals_its_network_and_says_how_objects_follow(root, monkeypatch):
    best = root / "run/checkpoints/best.ckpt"
    options = ("--checkpoint", best, "--format", "torchscript", "--output", root / "network.ts")
    assert tiny.call(monkeypatch, "export", *options, "--case", root / "images/case_0.png") == 0
    metadata = json.loads((root / "network.ts.json").read_text())
    assert metadata["parity"]["largest_difference"] < 1e-4
    assert "a case of 44 x 40 voxels" in metadata["parity"]["inputs"]
    assert "watershed" in metadata["outputs"]["decode"]


def a_mask(root):
    for path in (root / "objects").glob("*.png"):
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8)).save(path)


def a_large_value(root):
    objects = np.asarray(Image.open(root / "objects/case_0.png")).copy()
    objects[objects == 1] = 40_000
    Image.fromarray(objects).save(root / "objects/case_0.png")


@pytest.mark.parametrize(
    ("spoil", "more", "code", "text"),
    [
        (a_mask, [], 0, "all objects have one value"),
        (a_large_value, [], 1, "case_0.png: label values must lie in 0..32767, found 0 to 40000"),
        (
            None,
            ["data.ignore_label=9"],
            1,
            "data.ignore_label is for label maps of classes, but this dataset",
        ),
        (None, ["data.annotated={case_*:[border]}"], 1, "data.annotated is for label maps of classes"),
        (None, ["data.flip_label_pairs=[[interior,border]]"], 1, "flip_label_pairs"),
        (None, ["data.labels=nothing"], 1, "nothing"),
    ],
)
def test_what_is_wrong_with_the_data_is_said(tmp_path, capfd, monkeypatch, spoil, more, code, text):
    root = write_discs(tmp_path / "data")
    if spoil is not None:
        spoil(root)
    run = words(root, "run", *more)
    assert tiny.call(monkeypatch, "preprocess", *[word for word in run if "trainer" not in word]) == code
    assert text in "".join(capfd.readouterr())


def test_options_for_classes_are_refused(root, predictions, capfd):
    with pytest.MonkeyPatch.context() as patch:
        best = root / "run/checkpoints/best.ckpt"
        arguments = (
            "--checkpoint",
            best,
            "--input",
            root / "images",
            "--output",
            root / "again",
            "--quality",
        )
        assert tiny.call(patch, "predict", *arguments) == 1
        folders = (
            "--predictions",
            predictions,
            "--references",
            root / "objects",
            "--output",
            root / "x.json",
        )
        assert tiny.call(patch, "evaluate", *folders, "--lesions") == 1
    with pytest.raises(ValueError, match="lesion_iou, centreline and raters are for label maps of classes"):
        medconv.evaluate(predictions, root / "objects", lesion_iou=0.5)
    with pytest.raises(ValueError, match="tolerance_mm, lesion_iou, centreline and raters are for label"):
        medconv.evaluate(predictions, root / "objects", tolerance_mm=2)
    with pytest.raises(ValueError, match="arrays are scored by classes, these are instances; give files"):
        medconv.evaluate(discs(), discs(), spacing_mm=(1, 1), targets=InstanceTargets())
    errors = "".join(capfd.readouterr())
    assert "--quality is for label maps of classes" in errors
    assert "--lesions is for label maps of classes" in errors
