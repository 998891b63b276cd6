"""medconv/training/callbacks/progress.py: the curve has the voxels of the patches that were trained on."""

import json
from math import prod

from helpers import tiny

LAYERED = ("data.patch_size=[16,16,16]", "model.channels=[4,4,4]", "model.strides=[2,2]")
LOGGED = ("callbacks=default", "trainer.log_every_n_steps=2", "trainer.max_steps=8")


def test_the_curve_has_the_sizes_of_the_patches_of_its_steps(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data/tiny", cases=4)
    sizes = tmp_path / "sizes"
    spy = ["+callbacks.sizes._target_=helpers.tiny.Sizes", f"+callbacks.sizes.path={sizes}"]
    tiny.train(dataset, tmp_path / "run", *LAYERED, *LOGGED, *spy)
    voxels = [prod(json.loads(line)) for line in sizes.read_text().splitlines()]
    assert tiny.logged(tmp_path / "run", "train/patch_voxels") == voxels[1::2]
    assert voxels[1] < voxels[-1]


def test_the_last_row_has_the_values_of_its_own_step(tmp_path):
    """Lightning writes a row for the last step, whatever its number, with the last values it was given."""
    dataset = tiny.write_dataset(tmp_path / "data/tiny", cases=4)
    steps = ("callbacks=default", "trainer.max_steps=8", "scheduler=cosine")
    for every in (1, 5):
        tiny.train(dataset, tmp_path / f"run{every}", *LAYERED, *steps, f"trainer.log_every_n_steps={every}")
    for name in ("train/lr", "train/patch_voxels"):
        rows = tiny.logged(tmp_path / "run1", name)
        assert tiny.logged(tmp_path / "run5", name) == [rows[4], rows[7]]


def test_whole_patches_have_no_curve(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data/tiny", cases=4)
    tiny.train(dataset, tmp_path / "run", *LAYERED, *LOGGED, "schedule.patch=whole")
    assert tiny.logged(tmp_path / "run", "train/patch_voxels") == []
