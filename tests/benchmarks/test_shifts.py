"""scripts/benchmarks/shifts.py: images are changed as said, and networks of `learning` predict them."""

import numpy as np
import pytest
from helpers import tiny
from helpers.benchmarks_harness import benchmark, commands_in_this_process, learning_arguments

from benchmarks.shifts import SHIFTS

IMAGE = np.random.default_rng(0).normal(size=(1, 8, 8, 6)).astype(np.float32)
LABEL = np.random.default_rng(1).integers(0, 3, (8, 8, 6)).astype(np.int16)


def test_a_right_angle_and_a_mirror_are_exact():
    image, label = SHIFTS["turned by 90 degrees"]((IMAGE, LABEL))
    np.testing.assert_allclose(image, np.rot90(IMAGE, 1, (1, 2)), atol=1e-5)
    np.testing.assert_array_equal(label, np.rot90(LABEL, 1, (0, 1)))
    image, label = SHIFTS["mirrored"]((IMAGE, LABEL))
    np.testing.assert_array_equal(image[0, 0], IMAGE[0, -1])
    np.testing.assert_array_equal(label[0], LABEL[-1])


def test_thick_slices_have_the_mean_of_thin_ones_and_the_labels_stay():
    image, label = SHIFTS["slices 4 times as thick"]((IMAGE, LABEL))
    np.testing.assert_allclose(image[..., 1], IMAGE[..., :4].mean(-1), atol=1e-6)
    np.testing.assert_allclose(image[..., 5], IMAGE[..., 4:].mean(-1), atol=1e-6)
    np.testing.assert_array_equal(label, LABEL)


@pytest.mark.parametrize("name", SHIFTS)
def test_every_shift_keeps_the_shape(name):
    image, label = SHIFTS[name]((IMAGE, LABEL))
    assert image.shape == IMAGE.shape
    assert label.shape == LABEL.shape
    assert (name == "none") == (np.array_equal(image, IMAGE) and np.array_equal(label, LABEL))


def test_networks_are_compared_under_a_shift(monkeypatch, tmp_path):
    commands_in_this_process(monkeypatch)
    dataset = tiny.write_dataset(tmp_path / "data", cases=10)
    arguments = learning_arguments(dataset, tmp_path / "runs", ["plain", "rates by tap"], seeds=1)
    trained = benchmark(monkeypatch, tmp_path, *arguments)
    (folder,) = (tmp_path / "runs/data").glob("3-2-*")
    shifts = ["--shifts", "none", "mirrored"]
    rows = benchmark(monkeypatch, tmp_path, "shifts", "--root", str(dataset), "--runs", str(folder), *shifts)
    assert [(row["variant"], row["case"]) for row in rows] == [
        ("plain", "none"),
        ("plain", "mirrored"),
        ("rates by tap", "none"),
        ("rates by tap", "mirrored"),
    ]
    assert rows[0]["dice"] == pytest.approx(trained[0]["dice"], abs=1e-3)
    assert rows[1]["dice"] != rows[0]["dice"]
