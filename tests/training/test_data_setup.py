"""medconv/training/data_setup.py: the dataset of a config, and what it refuses."""

import sys

import numpy as np
import pytest
from helpers import tiny
from helpers.picture_tables import checked, write

from medconv import config
from medconv.data.io.raster import write_picture
from medconv.data.preprocessing import compressed
from medconv.training import data_setup


@pytest.mark.parametrize(
    ("sizes", "overrides", "message"),
    [
        (
            {"_3": (9, 9)},
            [],
            r"3\.png: 9 x 9 pixels, while most pictures have 12 x 8; expected one size; "
            r"data\.resize=\[12,8\], for example, scales all of them to it",
        ),
        (
            {**{f"_{i}": (1200, 30) for i in range(10)}, "_3": (9, 9)},
            [],
            r"most pictures have 1200 x 30; expected one size; data\.resize=\[512,13\]",
        ),
        ({}, ["data.regions={x:[1]}"], r"data\.regions is for label maps"),
        ({}, ["data.flip_label_pairs=[[a,b]]"], r"data\.flip_label_pairs exchanges classes of label maps"),
        (
            {},
            ["data.balanced_sampling=true", "data.target_type=regression", "data.label_columns=age"],
            r"data\.balanced_sampling=true draws each class",
        ),
        ({}, ["data.num_folds=10"], "no validation case has class"),
    ],
)
def test_invalid_settings_are_errors(tmp_path, sizes, overrides, message):
    with pytest.raises(ValueError, match=message):
        data_setup.prepare_data(checked(write(tmp_path / "data", **sizes), *overrides))


def test_resize_scales_pictures_of_different_sizes(tmp_path):
    table = write(tmp_path / "data", 20, _3=(9, 30))
    prepared = data_setup.prepare_data(checked(table, "data.resize=[16,8]"))
    assert prepared.preprocessing.resize == (16, 8) and prepared.plan.patch_size == (16, 8)
    assert all(prepared.store.read(case.id).image.shape == (1, 16, 8) for case in prepared.dataset.cases)


def test_pictures_too_large_for_memory_are_prepared_on_a_coarser_grid(tmp_path):
    sizes = {f"_{i}": (96, 80) for i in range(20)}
    prepared = data_setup.prepare_data(checked(write(tmp_path / "data", 20, **sizes), "plan.memory_gb=0.05"))
    edges = prepared.plan.patch_size
    assert all(edge < 80 for edge in edges) and prepared.plan.spacing_mm[0] > 1
    assert all(prepared.store.read(case.id).image.shape == (1, *edges) for case in prepared.dataset.cases)


def test_a_value_to_ignore_of_255_is_refused_for_pictures(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        write_picture(tmp_path / folder / "a.png", np.eye(8, dtype=np.uint8))
    arguments = ["data=image_mask", f"data.images={tmp_path}/images", f"data.labels={tmp_path}/masks"]
    data = config.data_of(tiny.composed(*arguments, "data.ignore_label=255"))
    with pytest.raises(ValueError, match=r"a\.png: the value to ignore must be below 100"):
        data_setup.find_data(data)


def test_a_compressed_store_needs_its_package(dataset, tmp_path, monkeypatch):
    """Said before a file is read."""
    monkeypatch.setitem(sys.modules, "blosc2", None)
    compressed.blosc2.cache_clear()
    run_config = tiny.checked(dataset, f"data.cache_dir={tmp_path}", "data.store=blosc2")
    message = r"^data\.store=blosc2 needs the package blosc2: pip install 'medconv\[blosc2\]'$"
    with pytest.raises(ValueError, match=message):
        data_setup.find_data(run_config.data)
