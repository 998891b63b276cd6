"""The examples of docs/contributing/ work as they are shown: written to a folder `mine`, then used by commands."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import ranks, tiny

PAGES = [tiny.ROOT / "CONTRIBUTING.md", *sorted((tiny.ROOT / "docs/contributing").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
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
        self.run("train", "--package", "mine", "--config-dir", self.path / "mine", *run)
        with (self.path / "runs" / name / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
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
    _forget_mine()  # another test of this process may have had a folder of this name
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.chdir(path)
        yield Home(path, patch)
    _forget_mine()


def _forget_mine():
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def test_an_example_of_each_group_in_one_training(home):
    rows = home.train("doors", *OPTIONS, *RECIPE)
    assert [float(row["train/weight_norm"]) > 0 for row in rows if row["train/loss"]] == [True, True]
    best, scan = home.path / "runs/doors/checkpoints/best.ckpt", home.path / "scans/case_0.image.npz"
    arguments = ["--checkpoint", best, "--input", scan, "--output", home.path / "out"]
    home.run("predict", *arguments, "--package", "mine")
    (written,) = (home.path / "out").glob("*.nii.gz")
    with np.load(scan) as arrays:
        assert nib.load(written).shape == arrays["voxels"].shape
        np.testing.assert_allclose(nib.load(written).affine, arrays["affine"])


def test_transforms_of_monai_and_torchio(home):
    pytest.importorskip("torchio", reason="pip install torchio")
    home.train("transforms", "augmentation=slices", "task.mirror_axes=[1]")


def test_a_kind_of_targets_and_a_metric(home):
    table, images = home.path / "tiny/labels.csv", sorted((home.path / "tiny/imagesTr").iterdir())
    rows = [f"{image.relative_to(table.parent)},{number / 4}" for number, image in enumerate(images)]
    table.write_text("\n".join(["path,label", *rows]))
    data = ["data=csv", f"data.root={table}", "data.target_type=fractions"]
    home.train("fractions", *data, "loss=fractions", "optimizer.lr=1e-3")
    best = home.path / "runs/fractions/checkpoints/best.ckpt"
    answers = ["--input", table, "--output", home.path / "answers"]
    home.run("predict", "--checkpoint", best, "--package", "mine", *answers)
    predictions = home.path / "answers/predictions.csv"
    with predictions.open(newline="") as file:
        assert all(0 < float(row["label"]) < 1 for row in csv.DictReader(file))
    output = home.path / "scores.json"
    words = ["--predictions", predictions, "--labels", table, "--output", output]
    home.run("evaluate", "--package", "mine", *words)
    assert 0 <= json.loads(output.read_text())["mean"]["within_5_percent"] <= 1


def test_targets_with_outputs_per_voxel(home, capsys):
    data = ["data=distances", f"data.root={home.path / 'tiny'}", "optimizer.lr=1e-3"]
    with pytest.raises(AssertionError):
        home.train("auto", *data)
    assert "set loss=distances, with --config-dir" in capsys.readouterr().err
    home.train("distances", *data, "loss=distances")
    best, scan = home.path / "runs/distances/checkpoints/best.ckpt", home.path / "tiny/imagesTr/case_0.nii.gz"
    arguments = ["--checkpoint", best, "--input", scan, "--output", home.path / "near"]
    home.run("predict", *arguments, "--package", "mine")
    (written,) = (home.path / "near").glob("*.nii.gz")
    assert set(np.unique(nib.load(written).dataobj)) <= {0, 1, 2}


def test_a_metric_of_label_maps(home):
    folder, output = home.path / "tiny/labelsTr", home.path / "maps.json"
    words = ["--predictions", folder, "--references", folder, "--output", output]
    home.run("evaluate", "--package", "mine", *words)
    assert json.loads(output.read_text())["mean"]["sensitivity"] == 1
    assert "Sensitivity" in output.with_suffix(".html").read_text()


def outside(home, *words):
    """A command in a process of its own, to which nothing but its current folder tells of `mine`."""
    return ranks.command(*words, cwd=home.path)


SMALL_RUN = ["trainer.max_steps=2", "trainer.enable_progress_bar=false", "trainer.accelerator=cpu"]


def test_a_format_and_a_metric_enter_each_process_by_the_name_of_their_package(home):
    run = ["data=pairs", f"data.root={home.path / 'scans'}", f"data.cache_dir={home.path / 'other'}"]
    run += [
        *SMALL_RUN,
        "plan.size=tiny",
        "data.num_folds=2",
        "data.samples_per_epoch=4",
        "data.num_workers=2",
    ]
    folder = home.path / "runs/outside"
    trained = outside(
        home, "train", *run, f"run.dir={folder}", "--package", "mine", "--config-dir", home.path / "mine"
    )
    assert trained.returncode == 0, trained.stderr
    best, scans, out = folder / "checkpoints/best.ckpt", home.path / "scans/case_0.image.npz", home.path / "o"
    words = ["predict", "--checkpoint", best, "--input", scans, "--output", out]
    refused = outside(home, *words)
    assert refused.returncode == 1
    assert refused.stderr == f"error: {best} was made with a package of your own: add --package mine\n"
    predicted = outside(home, *words, "--package", "mine")
    assert predicted.returncode == 0 and list(out.glob("*.nii.gz")), predicted.stderr
    labels, scores = home.path / "tiny/labelsTr", home.path / "outside.json"
    words = ["--predictions", labels, "--references", labels, "--output", scores, "--package", "mine"]
    evaluated = outside(home, "evaluate", *words)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(scores.read_text())["mean"]["sensitivity"] == 1
    table = [line.split() for line in evaluated.stdout.splitlines()]
    assert table[0][-2:] == ["Sensitivity", "cases"]
    assert table[1][-2] == "1.0000"


def test_a_kind_of_targets_enters_each_process_by_the_name_of_its_package(home):
    table, images = home.path / "tiny/outside.csv", sorted((home.path / "tiny/imagesTr").iterdir())
    rows = [f"{image.relative_to(table.parent)},{number / 4}" for number, image in enumerate(images)]
    table.write_text("\n".join(["path,label", *rows]))
    run = ["data=csv", f"data.root={table}", "data.target_type=fractions", "loss=fractions", *SMALL_RUN]
    run += ["plan.size=tiny", "data.num_folds=2", "data.samples_per_epoch=4", "data.num_workers=0"]
    folder = home.path / "runs/kind"
    package = ["--package", "mine"]
    trained = outside(home, "train", *package, "--config-dir", "mine", *run, f"run.dir={folder}")
    assert trained.returncode == 0, trained.stderr
    predict = ["--checkpoint", folder / "checkpoints/best.ckpt", "--input", table]
    predicted = outside(home, "predict", *predict, "--output", home.path / "k", *package)
    assert predicted.returncode == 0, predicted.stderr
    words = ["evaluate", "--predictions", home.path / "k", "--labels", table]
    words += ["--output", home.path / "kind.json"]
    refused = outside(home, *words)
    assert refused.returncode == 1 and "package of your own: add --package mine\n" in refused.stderr
    evaluated = outside(home, *words, *package)
    assert evaluated.returncode == 0, evaluated.stderr


def test_a_package_that_is_not_there_is_one_line(home):
    for command in (["train"], ["evaluate", "--predictions", "a", "--output", "b.json"]):
        refused = outside(home, *command, "--package", "nowhere")
        assert refused.returncode == 1 and refused.stderr.startswith("error: --package nowhere: cannot be im")


def test_every_example_is_used_above(home):
    options = set(re.findall(r"\w+=(\w+)", Path(__file__).read_text()))
    assert {Path(name).stem for name in EXAMPLES if name.endswith(".yaml")} <= options
    modules = {f"mine.{Path(name).stem}" for name in EXAMPLES if name.endswith(".py")} - {"mine.__init__"}
    unused = modules - set(sys.modules) - ({"mine.dark_slice"} if find_spec("torchio") is None else set())
    assert len(modules) >= 10 and not unused
