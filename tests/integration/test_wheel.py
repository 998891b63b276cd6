"""The built wheel: its configs travel along, its commands work from any folder, people's own YAMLs load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny


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
    subprocess.run([*pip, *build], check=True, timeout=300)
    (wheel,) = (folder / "dist").glob("medconv-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, timeout=300
    )
    return folder / "site"


def command(installed: Path, cwd: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    script = [sys.executable, str(installed / "bin" / name), *arguments]
    return subprocess.run(
        script, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_configs_travel_along(installed: Path, tmp_path: Path) -> None:
    assert (installed / "medconv/conf/train.yaml").is_file()
    assert (installed / "bin/medconv").is_file()
    assert not (installed / "medconv/benchmarks").exists() and not (installed / "benchmarks").exists()
    assert (installed / "hydra_plugins/medconv_sweeps/__init__.py").is_file()
    shown = command(
        installed,
        tmp_path,
        "medconv",
        "train",
        "--cfg",
        "job",
        "--resolve",
        "data=msd",
        "data.root=x",
        "-p",
        "data",
    )
    assert shown.returncode == 0, shown.stderr
    assert "medconv.data.datasets.decathlon.msd" in shown.stdout


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
    done = command(installed, tmp_path, "medconv", "train", *arguments)
    assert done.returncode == 0, done.stderr
    assert "convs_per_stage: 1" in (tmp_path / "runs/r/config.yaml").read_text()
    predicted = command(
        installed,
        tmp_path,
        "medconv",
        "predict",
        *(
            "--checkpoint",
            "runs/r/checkpoints/best.ckpt",
            "--input",
            str(dataset / "imagesTr"),
            "--output",
            "out",
        ),
    )
    assert predicted.returncode == 0, predicted.stderr
    evaluated = command(
        installed,
        tmp_path,
        "medconv",
        "evaluate",
        *("--predictions", "out", "--references", str(dataset / "labelsTr"), "--output", "metrics.json"),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert "mean foreground" in evaluated.stdout
    assert (tmp_path / "metrics.csv").is_file()
