"""medconv/training/plan_setup.py: the size and the dimensions of a plan, from a config and what a run recorded."""

from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.picture_tables import checked, write
from helpers.plans import fingerprint

from medconv.config import ConfigError
from medconv.data.datasets.auto import auto
from medconv.training import plan_setup
from medconv.training.data_setup import prepare_data


@pytest.mark.parametrize("more", [[], ["trainer.max_time=00:00:00:01"]])
def test_a_network_has_the_size_of_the_weights_that_it_begins_from(tmp_path: Path, more: list[str]) -> None:
    """Else they would not fit: an earlier run with a limit of time has another size than one without."""
    table, file = write(tmp_path / "data", 20), tmp_path / "first.ckpt"
    sizes = {"small": "small", None: "full"}  # without one: of a version that had no sizes
    for recorded, expected in sizes.items():
        record = {"config": {"derived": {"size": recorded}}}
        torch.save({"medconv": record, "state_dict": {"network.head.weight": torch.ones(2)}}, file)
        settings = checked(table, f"init.pretrained={file}", *more)
        assert prepare_data(settings).plan.size == expected
        assert prepare_data(settings, recorded={"size": "tiny"}).plan.size == "tiny"
    chosen = checked(table, f"init.pretrained={file}", "plan.size=medium", *more)
    assert prepare_data(chosen).plan.size == "medium"
    torch.save(
        {
            "medconv": {"config": {"derived": {"size": "huge"}}},
            "state_dict": {"network.head.weight": torch.ones(2)},
        },
        file,
    )
    with pytest.raises(ConfigError, match=r"init\.pretrained=.*first\.ckpt: is of a network of size huge"):
        prepare_data(checked(table, f"init.pretrained={file}", *more))


@pytest.mark.parametrize(("gpu", "expected"), [(False, "large"), (True, "full")])
def test_without_a_limit_of_time_a_gpu_has_the_grid_of_the_images(
    tmp_path: Path, gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_setup, "uses_gpu", lambda accelerator: gpu)
    settings = checked(write(tmp_path / "data", 20), "plan.memory_gb=1", "trainer.max_time=null")
    assert prepare_data(settings).plan.size == expected


THICK = fingerprint([(48, 48, 9)] * 9, [(1.0, 1.0, 8.0)] * 9, classes=3)
OPEN = (
    *("data.patch_size=null", "model.channels=${derived.channels}"),
    *("model.strides=${derived.strides}", "model.kernel_size=${derived.kernel_sizes}"),
)
SLICES = {"size": "tiny", "slice_axis": 2}


@pytest.mark.parametrize(
    ("recorded", "overrides", "dims"),
    [
        ({}, ["trainer.max_time=00:00:05:00"], 3),
        (SLICES, [], 2),
        (SLICES, ["trainer.max_time=00:00:05:00", "plan.size=small"], 2),
        (SLICES, ["data.spatial_dims=3"], 3),
        ({"size": "tiny"}, ["trainer.max_time=00:00:05:00"], 3),
    ],
)
def test_a_run_that_goes_on_keeps_slices_or_volumes(
    recorded: dict[str, object], overrides: list[str], dims: int, tmp_path: Path, dataset: Path
) -> None:
    """Also if its network was 2D, which these images would not get anew. So do its weights."""
    file = tmp_path / "earlier.ckpt"
    settings = [*OPEN, *overrides]
    settings = [f"data.cache_dir={tmp_path}", *settings]
    config = tiny.checked(dataset, *settings)
    found = auto(dataset)
    planned = plan_setup.make_plan(config, found, THICK, recorded)
    assert (planned.spatial_dims, planned.slice_axis) == (dims, {2: 2, 3: None}[dims])
    if not recorded:
        return
    torch.save(
        {"medconv": {"config": {"derived": recorded}}, "state_dict": {"network.head.weight": torch.ones(2)}},
        file,
    )
    config = tiny.checked(dataset, *settings, f"init.pretrained={file}")
    assert plan_setup.make_plan(config, found, THICK).spatial_dims == dims
    turned = fingerprint([(9, 48, 48)] * 9, [(8.0, 1.0, 1.0)] * 9, classes=3)
    assert plan_setup.make_plan(config, found, turned).slice_axis == {2: 0, 3: None}[dims]
    for three_axes in ("init.inflate_2d=inflate", "data.spacing_mm=[1,1,1]"):
        config = tiny.checked(dataset, *settings, f"init.pretrained={file}", three_axes)
        assert plan_setup.make_plan(config, found, THICK).spatial_dims == 3


@pytest.mark.parametrize(("model", "others"), [("resnet", True), ("encoder", False)])
def test_a_plan_says_if_the_network_has_channels_of_its_own(model: str, others: bool, tmp_path: Path) -> None:
    config = checked(write(tmp_path / "data", 20), f"model={model}", "plan.channels=[4,8]")
    channels = next(row for row in prepare_data(config).plan.rows if row[0] == "channels")
    assert channels[1] == "4 8" and channels[2].startswith("plan.channels")
    assert channels[2].endswith("the model has others") == others
