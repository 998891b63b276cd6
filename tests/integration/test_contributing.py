"""The examples of CONTRIBUTING.md work as they are shown: written to a folder `mine`, then used by commands."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny

from medconv import doors

TEXT = (tiny.ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"```(?:python|yaml)\n# mine/(\S+)\n(.*?)```", TEXT, flags=re.DOTALL))
OPTIONS = ["sampler=middle", "augmentation=slope", "model=dilated", "model.width=4", "conv=zero_mean"]
RECIPE = ["loss=top_k", "scheduler=square_root", "callbacks=weight_norm"]


@dataclass(frozen=True)
class Home:
    """A folder with the examples in `mine`, a dataset in the format of the examples, and commands there."""

    path: Path
    patch: pytest.MonkeyPatch

    def run(self, *arguments: object) -> None:
        assert tiny.call(self.patch, *arguments) == 0

    def train(self, name: str, *options: str) -> list[dict[str, str]]:
        """Two steps in the folder `runs/NAME`. Returns: rows of `metrics.csv`."""
        small = [setting for setting in tiny.SMALL if not setting.startswith(("model.", "trainer.max_steps"))]
        data = ["data=pairs", f"data.root={self.path / 'scans'}", f"data.cache_dir={self.path / 'prepared'}"]
        run = [*data, *small, f"run.dir={self.path / 'runs' / name}", "trainer.max_steps=2", *options]
        self.run("train", "--config-dir", self.path / "mine", *run)
        with (self.path / "runs" / name / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    path = tmp_path_factory.mktemp("contributing")
    for name, text in EXAMPLES.items():
        (path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "mine" / name).write_text(text)
    source = tiny.write_dataset(path / "tiny", cases=4)
    (path / "scans").mkdir()
    for kind, folder in (("image", "imagesTr"), ("label", "labelsTr")):
        for file in sorted((source / folder).iterdir()):
            scan = nib.load(file)
            name = path / "scans" / f"{file.name.removesuffix('.nii.gz')}.{kind}.npz"
            np.savez(name, voxels=np.asarray(scan.dataobj), affine=scan.affine)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.chdir(path)
        doors.add_package("mine")
        yield Home(path, patch)
    doors._named.clear()
    doors.features.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def test_an_example_of_each_group_in_one_training(home: Home) -> None:
    rows = home.train("doors", *OPTIONS, *RECIPE)
    assert [float(row["train/weight_norm"]) > 0 for row in rows if row["train/loss"]] == [True, True]
    best, scan = home.path / "runs/doors/checkpoints/best.ckpt", home.path / "scans/case_0.image.npz"
    arguments = ["--checkpoint", best, "--input", scan, "--output", home.path / "out"]
    home.run("predict", *arguments, "--trust-package", "mine")
    (written,) = (home.path / "out").glob("*.nii.gz")
    with np.load(scan) as arrays:
        assert nib.load(written).shape == arrays["voxels"].shape
        np.testing.assert_allclose(nib.load(written).affine, arrays["affine"])


def test_transforms_of_monai_and_torchio(home: Home) -> None:
    pytest.importorskip("torchio", reason="pip install torchio")
    home.train("transforms", "augmentation=slices", "task.mirror_axes=[1]")


def test_a_kind_of_targets_and_a_metric(home: Home) -> None:
    table, images = home.path / "tiny/labels.csv", sorted((home.path / "tiny/imagesTr").iterdir())
    rows = [f"{image.relative_to(table.parent)},{number / 4}" for number, image in enumerate(images)]
    table.write_text("\n".join(["path,label", *rows]))
    data = ["data=csv", f"data.root={table}", "data.target_type=fractions"]
    home.train("fractions", *data, "loss=fractions", "optimizer.lr=1e-3")
    best = home.path / "runs/fractions/checkpoints/best.ckpt"
    home.run("predict", "--checkpoint", best, "--input", table, "--output", home.path / "answers")
    predictions = home.path / "answers/predictions.csv"
    with predictions.open(newline="") as file:
        assert all(0 < float(row["label"]) < 1 for row in csv.DictReader(file))
    output = home.path / "scores.json"
    home.run("evaluate", "--predictions", predictions, "--labels", table, "--output", output)
    assert 0 <= json.loads(output.read_text())["mean"]["within_5_percent"] <= 1


def test_a_metric_of_label_maps(home: Home) -> None:
    folder, output = home.path / "tiny/labelsTr", home.path / "maps.json"
    home.run("evaluate", "--predictions", folder, "--references", folder, "--output", output)
    assert json.loads(output.read_text())["mean"]["sensitivity"] == 1
    assert "Sensitivity" in output.with_suffix(".html").read_text()


def test_every_example_is_used_above(home: Home) -> None:
    options = set(re.findall(r"\w+=(\w+)", Path(__file__).read_text()))
    assert {Path(name).stem for name in EXAMPLES if name.endswith(".yaml")} <= options
    modules = {f"mine.{Path(name).stem}" for name in EXAMPLES if name.endswith(".py")} - {"mine.__init__"}
    unused = modules - set(sys.modules) - ({"mine.dark_slice"} if find_spec("torchio") is None else set())
    assert len(modules) >= 10 and not unused
