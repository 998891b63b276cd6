"""The core without its features: all of them deleted, and each one alone."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers import tiny
from helpers.fresh_process import in_turn
from helpers.waiting import PATIENCE_S

FEATURES = sorted(path.parent.name for path in (tiny.ROOT / "medconv/features").glob("*/__init__.py"))
# What needs a feature by name: without that one, these are left out, too.
NEEDED_BY = {
    "pictures": ["report"],
    "pretrained": ["nnunet"],
    "cross_validation": ["postprocessing", "sweeps"],
    "image_level": ["joint"],
    "quality": ["bound"],
}
# Modules by which a feature enters another one: without that one, nobody asks for them.
PARTS_OF = {
    "export": ["nnunet.export"],
    "pictures": [
        "continuous.views",
        "image_level.report",
        "image_level.saliency",
        "image_level.saliency_extra",
        "image_level.views",
        "instances.report",
        "joint.views",
        "landmarks.views",
    ],
    "report": ["image_level.report", "instances.report"],
}


def package_without(folder, *features):
    """A folder to import medconv from, without some of its features; all of them if none is named."""
    if not features:
        shutil.copytree(tiny.ROOT / "medconv", folder / "medconv", ignore=shutil.ignore_patterns("features"))
    else:
        shutil.copytree(tiny.ROOT / "medconv", folder / "medconv")
        for feature in features:
            shutil.rmtree(folder / "medconv/features" / feature)
    (folder / "conf").symlink_to(tiny.ROOT / "conf")
    return folder


def python(package, *words, cwd):
    """An interpreter that finds this medconv."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(package)},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )


def nnunet_dataset(root):
    """The tiny dataset in the layout of nnU-Net."""
    dataset = tiny.write_dataset(root)
    for image in (dataset / "imagesTr").iterdir():
        image.rename(image.with_name(image.name.replace(".nii.gz", "_0000.nii.gz")))
    meta = {
        "channel_names": {"0": "MRI"},
        "labels": {"background": 0, "box": 1, "hole": 2},
        "numTraining": 7,
        "file_ending": ".nii.gz",
    }
    (dataset / "dataset.json").write_text(json.dumps(meta))
    return dataset


# Options whose feature is deleted, and what the error names
MISSING = [
    ("train -m seed=0,1", "error: -m starts a sweep, which medconv.features.sweeps runs"),
    ("train perf=autotune trainer.max_steps=1", "features.autotune"),
    ("train init.pretrained=weights.pth trainer.max_steps=1", "features.pretrained"),
    ("train conv=mirror trainer.max_steps=1", "features.equivariance"),
    ("train loss=cldice trainer.max_steps=1", "features.shape_losses"),
    ("train data=csv data.root=labels.csv", "features.image_level"),
    ("train model=unetplusplus trainer.max_steps=1", "features.monai_networks"),
    ("train scheduler=plateau trainer.max_steps=1", "features.plateau"),
    ("train augmentation=monai trainer.max_steps=1", "features.sample_transforms"),
    ("train data=instances data.images=i data.labels=l", "features.instances"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder in which commands of the core ran without any feature, and how they ended: those of MISSING,
    a training, a prediction and an evaluation.
    """
    home = tmp_path_factory.mktemp("alone")
    package, dataset = package_without(home / "core"), nnunet_dataset(home / "data")
    commands = [
        *(words.split() for words, _ in MISSING),
        ["train", *tiny.overrides(dataset, "data=nnunet"), "run.dir=run"],
        [
            "predict",
            "--checkpoint",
            "run/checkpoints/best.ckpt",
            "--input",
            "data/imagesTr",
            "--output",
            "out",
        ],
        ["evaluate", "--predictions", "out", "--references", "data/labelsTr", "--output", "metrics.json"],
    ]
    return home, in_turn(*map(tuple, commands), cwd=home, package=package)


def test_without_any_feature_the_core_trains_predicts_and_evaluates(alone):
    home, ended = alone
    trained, predicted, evaluated = ended[-3:]
    assert trained.code == 0, trained.err
    assert "mean foreground" in trained.out
    assert predicted.code == 0, predicted.err
    assert evaluated.code == 0, evaluated.err
    assert len(json.loads((home / "metrics.json").read_text())["cases"]) == 7


@pytest.mark.parametrize("number", range(len(MISSING)), ids=[words for words, _ in MISSING])
def test_an_option_whose_feature_is_missing_says_so_in_one_line(alone, number):
    ended = alone[1][number]
    assert ended.code == 1, ended.err
    (error,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert MISSING[number][1] in error.replace("/", ".")


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_without_one_feature_all_else_can_be_imported_and_trains(tmp_path, feature):
    package = package_without(tmp_path / "rest", feature, *NEEDED_BY.get(feature, []))
    code = f"""
import pkgutil, importlib, medconv
left_out = {[f"medconv.features.{name}" for name in PARTS_OF.get(feature, [])]}
for module in pkgutil.walk_packages(medconv.__path__, "medconv."):
    if not module.name.endswith("__main__") and module.name not in left_out:
        importlib.import_module(module.name)
"""
    done = python(package, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    dataset = tiny.write_dataset(tmp_path / "data")
    words = [*tiny.overrides(dataset), f"run.dir={tmp_path / 'run'}"]
    trained = python(package, "-m", "medconv.cli", "train", *words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
