"""Training on two datasets of which one lacks a class, as a user does: loaders, loss, Dice, summary, prediction."""

import json

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny

from medconv import config
from medconv.training import run
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder of options with data=both: `a` has box and hole, `b` has only Hole, as value 1."""
    root = tmp_path_factory.mktemp("joined")
    tiny.write_dataset(root / "a", 5)
    meta = json.loads((tiny.write_dataset(root / "b", 5) / "dataset.json").read_text())
    for path in (root / "b/labelsTr").iterdir():
        image = nib.load(path)
        nib.save(nib.Nifti1Image((np.asarray(image.dataobj) == 2).astype(np.uint8), image.affine), path)
    (root / "b/dataset.json").write_text(json.dumps({**meta, "labels": {"0": "background", "1": "Hole"}}))
    (root / "options/data").mkdir(parents=True)
    b = f"{{layout: msd, root: {root}/b, rename: {{Hole: hole}}}}"
    text = f"defaults: [joined]\nentries:\n  a: {{layout: msd, root: {root}/a}}\n  b: {b}\n"
    (root / "options/data/both.yaml").write_text(text)
    return root / "options"


def test_a_dataset_that_lacks_a_class_is_no_reference_for_it(both, tmp_path, caplog):
    overrides = [
        f"hydra.searchpath=[file://{both}]",
        "data=both",
        f"data.cache_dir={tmp_path / 'prepared'}",
        *tiny.SMALL,
        "data.num_workers=1",
        "data.group_pattern='_(case_.)'",
        "data.balanced_sampling=true",
        "data.case_weights={b_*: 2}",
        "loss=dice_ce",
        "loss.class_weights={hole: 2}",
        "task.deep_supervision=true",
        f"run.dir={tmp_path / 'run'}",
    ]
    checked = config.validate(tiny.composed(*overrides))
    caplog.set_level("INFO")
    summary = run.train(checked, RunDir.of(checked, {}))
    assert set(summary["val/dice_per_class"]) == {"box", "hole"}
    assert all(np.isfinite(tiny.losses(tmp_path / "run")))
    content = checkpoint_io.read(tmp_path / "run/checkpoints/best.ckpt")["medconv"]
    rows = content["validation"]
    names = set(content["train_cases"])  # also those by which prediction may meet the files again
    assert {name.partition("_")[2] for name in names if name[:2] in ("a_", "b_")} <= names
    assert {case[0] for case in rows} == {"a", "b"}
    assert all((row["box"] is None) == case.startswith("b_") for case, row in rows.items())
    for words in (
        "training cases that annotate a class, of 6: box in 3, hole in 6",
        "drawn by weight: 1 of 3, 2 of 3",
        "patches draw each class equally often; training cases with it, of 6: box in 3, hole in ",
        "loss: class weights {'hole': 2}",
    ):
        assert words in caplog.text
