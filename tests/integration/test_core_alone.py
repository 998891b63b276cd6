"""The core without its features: all of them deleted, and each one alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny
from helpers.waiting import PATIENCE_S

FEATURES = sorted(path.parent.name for path in (tiny.ROOT / "medconv/features").glob("*/__init__.py"))
# What needs a feature by name: without that one, these are left out, too.
NEEDED_BY = {"pretrained": ["nnunet"], "cross_validation": ["postprocessing", "sweeps"]}
# Modules by which a feature enters another one: without that one, nobody asks for them.
PARTS_OF = {
    "export": ["nnunet.export"],
    "pictures": ["image_level.views"],
    "report": ["image_level.report", "instances.report"],
}


def package_without(folder: Path, *features: str) -> Path:
    """A folder to import medconv from, without some of its features; all of them if none is named."""
    if not features:
        shutil.copytree(tiny.ROOT / "medconv", folder / "medconv", ignore=shutil.ignore_patterns("features"))
    else:
        shutil.copytree(tiny.ROOT / "medconv", folder / "medconv")
        for feature in features:
            shutil.rmtree(folder / "medconv/features" / feature)
    (folder / "conf").symlink_to(tiny.ROOT / "conf")
    return folder


def medconv(package: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "medconv.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(package)},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )


def nnunet_dataset(root: Path) -> Path:
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


def test_without_any_feature_the_core_trains_predicts_and_evaluates(tmp_path: Path) -> None:
    package = package_without(tmp_path / "core")
    dataset = nnunet_dataset(tmp_path / "data")
    words = [*tiny.overrides(dataset, "data=nnunet"), f"run.dir={tmp_path / 'run'}"]
    trained = medconv(package, "train", *words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "mean foreground" in trained.stdout

    predicted = tmp_path / "predicted"
    checkpoint = tmp_path / "run/checkpoints/best.ckpt"
    inputs = ("--input", dataset / "imagesTr", "--output", predicted)
    done = medconv(package, "predict", "--checkpoint", checkpoint, *inputs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    compared = ("--predictions", predicted, "--references", dataset / "labelsTr")
    done = medconv(package, "evaluate", *compared, "--output", tmp_path / "metrics.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "metrics.json").read_text())["cases"]) == 7


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "-m", "seed=0,1"], "features.sweeps"),
        (["train", "perf=autotune", "trainer.max_steps=1"], "features.autotune"),
        (["train", "init.pretrained=weights.pth", "trainer.max_steps=1"], "features.pretrained"),
        (["train", "conv=mirror", "trainer.max_steps=1"], "features.equivariance"),
        (["train", "loss=cldice", "trainer.max_steps=1"], "features.shape_losses"),
        (["train", "data=csv", "data.root=labels.csv"], "features.image_level"),
        (["train", "data=instances", "data.images=i", "data.labels=l"], "features.instances"),
    ],
)
def test_an_option_whose_feature_is_missing_says_so_in_one_line(
    tmp_path: Path, words: list[str], named: str
) -> None:
    done = medconv(package_without(tmp_path / "core"), *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert named in error.replace("/", ".")


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_without_one_feature_all_else_can_be_imported_and_trains(tmp_path: Path, feature: str) -> None:
    package = package_without(tmp_path / "rest", feature, *NEEDED_BY.get(feature, []))
    code = f"""
import pkgutil, importlib, medconv
left_out = {[f"medconv.features.{name}" for name in PARTS_OF.get(feature, [])]}
for module in pkgutil.walk_packages(medconv.__path__, "medconv."):
    if not module.name.endswith("__main__") and module.name not in left_out:
        importlib.import_module(module.name)
"""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    dataset = tiny.write_dataset(tmp_path / "data")
    words = [*tiny.overrides(dataset), f"run.dir={tmp_path / 'run'}"]
    trained = medconv(package, "train", *words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
