"""medconv/training/data_setup.py: the dataset of a config, and the config values that follow from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.picture_tables import SIZE, pixels, write
from hydra import compose, initialize_config_dir

from medconv import config
from medconv.config import RunConfig
from medconv.data.io.raster import write_picture
from medconv.training import data_setup


def checked(table: Path, *overrides: str) -> RunConfig:
    arguments = [
        "data=csv",
        f"data.root={table}",
        f"data.cache_dir={table.parent.parent / 'cache'}",
        "data.num_workers=0",
    ]
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return config.validate(
            compose("train", [*arguments, "trainer.accelerator=cpu", "data.num_folds=2", *overrides])
        )


def test_derived_values_of_classes_and_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = write(tmp_path / "data", 20)
    write_picture(tmp_path / "data/1.png", pixels(2))  # a copy of 2
    settings = checked(table, "data.balanced_sampling=true", "data.fold=1")
    prepared = data_setup.prepare_data(settings)
    derived = data_setup.derived_values(prepared)
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
    assert "1 images are in training and also in validation" in caplog.text
    assert len(prepared.train) + len(prepared.val) == 19
    assert derived.class_counts == [sum(c.values == (v,) for c in prepared.train) for v in (0.0, 1.0)]
    assert derived.monitor == "val/auc" and derived.num_train_cases == len(prepared.train)
    resolved = config.resolve(settings, derived)
    resolved = replace(resolved, data=replace(resolved.data, batch_size=4))
    batch = next(iter(data_setup.build_data(resolved, prepared).train_dataloader()))
    assert sorted(batch["label"].flatten().tolist()) == [0, 0, 1, 1]
    numbers = data_setup.prepare_data(
        checked(table, "data.target_type=regression", "data.label_columns=age", "data.fold=all")
    )
    derived = data_setup.derived_values(numbers)
    assert derived.targets["means"] == [pytest.approx(29.5)]
    assert derived.targets["stds"] == [pytest.approx(np.arange(20).std())]
    assert derived.class_counts is None and derived.num_classes == 1 and not numbers.val


@pytest.mark.parametrize(
    ("sizes", "overrides", "message"),
    [
        (
            {"_3": (9, 9)},
            [],
            r"3\.png: 9 x 9 pixels, while most pictures have 12 x 8; expected one size, or "
            r"data\.resize=\[12,8\]",
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
def test_invalid_settings_are_errors(tmp_path: Path, sizes: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_setup.prepare_data(checked(write(tmp_path / "data", **sizes), *overrides))


def test_resize_scales_pictures_of_different_sizes(tmp_path: Path) -> None:
    table = write(tmp_path / "data", 20, _3=(9, 30))
    prepared = data_setup.prepare_data(checked(table, "data.resize=[16,8]"))
    assert prepared.preprocessing.resize == (16, 8) and prepared.plan.patch_size == (16, 8)
    assert all(prepared.store.read(case.id).image.shape == (1, 16, 8) for case in prepared.dataset.cases)


@pytest.mark.parametrize("more", [[], ["trainer.max_time=00:00:00:01"]])
def test_a_network_has_the_size_of_the_weights_that_it_begins_from(tmp_path: Path, more: list[str]) -> None:
    """Else they would not fit: an earlier run with a limit of time has another size than one without."""
    table, file = write(tmp_path / "data", 20), tmp_path / "first.ckpt"
    sizes = {"small": "small", None: "large"}  # without one: of a version that had no sizes
    for recorded, expected in sizes.items():
        record = {"config": {"derived": {"size": recorded}}}
        torch.save({"medconv": record, "state_dict": {"network.head.weight": torch.ones(2)}}, file)
        settings = checked(table, f"init.pretrained={file}", *more)
        assert data_setup.prepare_data(settings).plan.size == expected
        assert data_setup.prepare_data(settings, recorded={"size": "tiny"}).plan.size == "tiny"
    chosen = checked(table, f"init.pretrained={file}", "plan.size=medium", *more)
    assert data_setup.prepare_data(chosen).plan.size == "medium"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["conv=none", "model=resenc"], True),
        (["trainer.max_time=null"], False),
        (["data.spacing_mm=[1,1,4]"], False),
        (["data.patch_size=[16,16,16]"], False),
        (["plan.strides=[[2,2,1]]"], False),
        (["plan.kernel_sizes=[3,3]"], False),
        (["plan.size=large"], False),
        (["init.pretrained=weights.pth"], False),
        (["conv=acs"], False),
        (["model=segresnet"], False),
    ],
)
def test_thick_slices_are_for_runs_whose_network_time_decides(overrides: list[str], expected: bool) -> None:
    """And in which nothing needs three axes."""
    settings = checked(Path("labels.csv"), "trainer.max_time=00:00:05:00", *overrides)
    assert data_setup.may_take_slices(settings) == expected


def test_a_value_to_ignore_of_255_is_refused_for_pictures(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        write_picture(tmp_path / folder / "a.png", np.eye(8, dtype=np.uint8))
    arguments = ["data=image_mask", f"data.images={tmp_path}/images", f"data.labels={tmp_path}/masks"]
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        data = config.data_of(compose("train", [*arguments, "data.ignore_label=255"]))
    with pytest.raises(ValueError, match=r"a\.png: the value to ignore must be below 100"):
        data_setup.find_data(data)
