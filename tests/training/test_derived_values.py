"""medconv/training/plan_setup.py: the config values that follow from the data."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.picture_tables import SIZE, checked, pixels, write

from medconv import config
from medconv.data.io.raster import write_picture
from medconv.training.data_setup import build_data, prepare_data


def test_derived_values_of_classes_and_numbers(tmp_path, caplog):
    table = write(tmp_path / "data", 20)
    write_picture(tmp_path / "data/1.png", pixels(2))  # a copy of 2
    settings = checked(table, "data.balanced_sampling=true", "data.fold=1")
    prepared = prepare_data(settings)
    derived = prepared.derived
    expected = {
        "targets": {"kind": "multiclass", "names": ["a", "b"]},
        "num_classes": 2,
        "num_channels": 1,
        "class_names": ["a", "b"],
        "patch_size": list(SIZE),
        "spatial_dims": 2,
    }
    assert {key: getattr(derived, key) for key in expected} == expected
    validation = {case.id for case in prepared.val}
    assert ("1" in validation) != ("2" in validation), "else the next line tests nothing"
    assert "images of training cases are also in validation" in caplog.text
    assert len(prepared.train) + len(prepared.val) == 19
    assert derived.class_counts == [sum(c.values == (v,) for c in prepared.train) for v in (0.0, 1.0)]
    assert derived.monitor == "val/cross_entropy" and derived.num_train_cases == len(prepared.train)
    resolved = config.resolve(settings, derived)
    resolved = replace(resolved, data=replace(resolved.data, batch_size=4, samples_per_epoch=4))
    batch = next(iter(build_data(resolved, prepared).train_dataloader()))
    assert sorted(batch["label"].flatten().tolist()) == [0, 0, 1, 1]
    numbers = prepare_data(
        checked(table, "data.target_type=regression", "data.label_columns=age", "data.fold=all")
    )
    derived = numbers.derived
    assert derived.targets["means"] == [pytest.approx(29.5)]
    assert derived.targets["stds"] == [pytest.approx(np.arange(20).std())]
    assert derived.class_counts is None and derived.num_classes == 1 and not numbers.val
