"""medconv/features/pretrained/source.py and hub.py: where weights come from."""

from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.hub import SOURCE, serving
from helpers.picture_tables import checked, write
from helpers.plans import fingerprint

from medconv.config import ConfigError
from medconv.data.datasets.dataset_json import auto
from medconv.features.pretrained.hub import local_file
from medconv.features.pretrained.source import WeightFile
from medconv.planning.limits import EarlierPlan
from medconv.training.data_setup import prepare_data
from medconv.training.plan_setup import make_plan
from medconv.training.weight_source import weight_source

THICK = fingerprint([(48, 48, 9)] * 9, [(1.0, 1.0, 8.0)] * 9, classes=3)
TURNED = fingerprint([(9, 48, 48)] * 9, [(8.0, 1.0, 1.0)] * 9, classes=3)
OPEN = (
    *("data.patch_size=null", "model.channels=${derived.channels}"),
    *("model.strides=${derived.strides}", "model.kernel_size=${derived.kernel_sizes}"),
)


def _save(file, **derived):
    """A checkpoint of a run with this plan."""
    weights = {"network.head.weight": torch.ones(2)}
    torch.save({"medconv": {"config": {"derived": derived}}, "state_dict": weights}, file)
    return file


@pytest.mark.parametrize("more", [[], ["trainer.max_time=00:00:00:01"]])
def test_a_network_has_the_size_of_the_weights_that_it_begins_from(tmp_path, more):
    """Else they would not fit: an earlier run with a limit of time has another size than one without."""
    table, file = write(tmp_path / "data", 20), tmp_path / "first.ckpt"
    sizes = {"small": "small", None: "full"}  # without one: of a version that had no sizes
    for recorded, expected in sizes.items():
        _save(file, size=recorded)
        settings = checked(table, f"init.pretrained={file}", *more)
        assert prepare_data(settings).plan.size == expected
        assert prepare_data(settings, earlier_plan=EarlierPlan("", size="tiny")).plan.size == "tiny"
    chosen = checked(table, f"init.pretrained={file}", "plan.size=medium", *more)
    assert prepare_data(chosen).plan.size == "medium"
    _save(file, size="huge")
    with pytest.raises(ConfigError, match=r"init\.pretrained=.*first\.ckpt: is of a network of size huge"):
        prepare_data(checked(table, f"init.pretrained={file}", *more))


@pytest.mark.parametrize(
    ("slice_axis", "overrides", "dims"),
    [
        (2, [], 2),
        (2, ["trainer.max_time=00:00:05:00", "plan.size=small"], 2),
        (2, ["data.spatial_dims=3"], 3),
        (2, ["init.inflate_2d=inflate"], 3),
        (2, ["data.spacing_mm=[1,1,1]"], 3),
        (None, ["trainer.max_time=00:00:05:00"], 3),
    ],
)
def test_weights_of_slices_begin_a_network_of_slices(slice_axis, overrides, dims, tmp_path, dataset):
    """Across the axis of thick slices, whichever that is in these images."""
    file = _save(tmp_path / "earlier.ckpt", size="tiny", slice_axis=slice_axis)
    settings = (f"data.cache_dir={tmp_path}", f"init.pretrained={file}", *OPEN, *overrides)
    config = tiny.checked(dataset, *settings)
    planned = make_plan(config, auto(dataset), THICK)
    assert (planned.spatial_dims, planned.slice_axis) == (dims, {2: 2, 3: None}[dims])
    assert make_plan(config, auto(dataset), TURNED).slice_axis == {2: 0, 3: None}[dims]


def test_files_and_the_hub_are_files_of_weights(tmp_path):
    for name in (str(tmp_path / "missing.ckpt"), "hf://OWNER/NAME/model.safetensors"):
        assert weight_source(name) == WeightFile(name)


CONTENT = b"some weights"


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    with serving(CONTENT, tmp_path / "cache", monkeypatch) as server:
        yield server


def test_a_path_stays_a_path():
    assert local_file("runs/a/best.ckpt") == Path("runs/a/best.ckpt")


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_a_file_is_downloaded_once(endpoint, revision):
    source = f"{SOURCE}{revision}"
    file = local_file(source)
    assert file.read_bytes() == CONTENT and file.name == "model.safetensors"
    endpoint.shutdown()
    endpoint.server_close()
    assert local_file(source) == file


def test_what_the_hub_does_not_have_is_named(endpoint):
    for source in ("hf://lab/lung/model.safetensors", "hf://lab/heart/model.safetensors@nowhere"):
        with pytest.raises(ValueError, match=rf"^{source}: the Hugging Face Hub does not give this file"):
            local_file(source)


def test_a_gated_file_says_how_to_get_it(endpoint):
    with pytest.raises(ValueError, match=r"accept terms on the Hugging Face Hub, and to log in"):
        local_file("hf://lab/gated/model.safetensors")


def test_without_a_network_it_is_said_what_to_copy(endpoint, monkeypatch):
    endpoint.shutdown()
    endpoint.server_close()
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # before each try
    with pytest.raises(ValueError, match=r"cannot be reached, and its cache does not have the file"):
        local_file(SOURCE)


@pytest.mark.parametrize(
    "source", ["hf://lab/heart/model.pkl", "hf://heart/model.safetensors", "hf://lab/heart", "hf://"]
)
def test_other_files_and_incomplete_names_are_refused(source):
    with pytest.raises(ValueError, match=r"expected hf://OWNER/NAME/FILE or .* ends in \.safetensors, \.pth"):
        local_file(source)
