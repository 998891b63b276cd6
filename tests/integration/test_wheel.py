"""The built wheel: its configs travel along, its commands work from any folder, people's own YAMLs load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny
from helpers.waiting import PATIENCE_S

import medconv


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout and unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder / "dist"),
        str(tiny.ROOT),
    ]
    subprocess.run([*pip, *build], check=True, timeout=PATIENCE_S)
    (wheel,) = (folder / "dist").glob("medconv-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)],
        check=True,
        timeout=PATIENCE_S,
    )
    return folder / "site"


# runs a script several times, as an interpreter would that need not load the libraries again
SEVERAL = """
import json, runpy, sys
script, commands = sys.argv[1:]
for arguments in json.loads(commands):
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            sys.exit(ended.code)
"""


def start(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """An interpreter that finds the wheel's `medconv`."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_configs_travel_along(installed: Path, tmp_path: Path) -> None:
    assert (installed / "medconv/conf/train.yaml").is_file()
    assert (installed / "bin/medconv").is_file()
    assert not (installed / "medconv/benchmarks").exists() and not (installed / "benchmarks").exists()
    assert (installed / "medconv/py.typed").is_file()
    script = str(installed / "bin/medconv")
    assert start(installed, tmp_path, script, "--version").stdout == f"medconv {medconv.__version__}\n"
    words = ["train", "--cfg", "job", "--resolve", "data=msd", "data.root=x", "-p", "data"]
    shown = start(installed, tmp_path, script, *words)
    assert shown.returncode == 0, shown.stderr
    assert "medconv.data.datasets.dataset_json.msd" in shown.stdout


def test_training_and_own_yaml_from_another_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine/model").mkdir(parents=True)
    original = (tiny.ROOT / "conf/model/customconv.yaml").read_text()
    (tmp_path / "mine/model/ours.yaml").write_text(
        original.replace("convs_per_stage: 2", "convs_per_stage: 1")
    )
    dataset = tiny.write_dataset(tmp_path / "a folder", cases=4)
    arguments = [
        "--config-dir",
        "mine",
        *tiny.overrides(dataset),
        "trainer.max_steps=2",
        "model=ours",
        "run.name=r",
    ]
    arguments = [
        a.replace("data.root=", "data.root='") + "'" if a.startswith("data.root=") else a for a in arguments
    ]
    arguments = [
        a.replace("data.cache_dir=", "data.cache_dir='") + "'" if a.startswith("data.cache_dir=") else a
        for a in arguments
    ]
    best, images, labels = "runs/r/checkpoints/best.ckpt", dataset / "imagesTr", dataset / "labelsTr"
    commands = [
        ["train", *arguments],
        ["predict", "--checkpoint", best, "--input", str(images), "--output", "out"],
        ["evaluate", "--predictions", "out", "--references", str(labels), "--output", "metrics.json"],
    ]
    done = start(installed, tmp_path, "-c", SEVERAL, str(installed / "bin/medconv"), json.dumps(commands))
    assert done.returncode == 0, done.stderr
    assert "convs_per_stage: 1" in (tmp_path / "runs/r/config.yaml").read_text()
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 4
    assert "mean foreground" in done.stdout.rpartition("predictions are in")[2]
    assert (tmp_path / "metrics.csv").is_file()
