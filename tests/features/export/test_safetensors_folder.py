"""medconv/features/export/safetensors_folder.py: what the folder holds, and that a run can begin from it."""

import json

import pytest
import torch
from helpers import ranks

from medconv.features.export.export import export
from medconv.features.export.job import ExportOptions
from medconv.features.pretrained.read import planned_as, read
from medconv.inference.load import load

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def folder(exported, tmp_path):
    export(exported.checkpoint, tmp_path / "tiny-organ", ExportOptions("safetensors"))
    return tmp_path / "tiny-organ"


def test_the_folder_has_weights_metadata_and_a_card(exported, folder):
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "model.safetensors.json",
        "README.md",
    }
    state = load(exported.checkpoint, plain=True).network.state_dict()
    written = safetensors.load_file(folder / "model.safetensors")
    assert written.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=0)
    metadata = json.loads((folder / "model.safetensors.json").read_text())
    assert metadata["parity"]["largest_difference"] <= 1e-4
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: medconv\n")
    assert "init.pretrained=hf://OWNER/tiny-organ/model.safetensors" in text
    scores = [value for value in metadata["validation"]["scores"].values() if isinstance(value, float)]
    assert scores and all(f": {score:.4f}" in text for score in scores)


def test_a_run_begins_with_these_weights_in_a_network_of_their_size(exported, folder):
    file = folder / "model.safetensors"
    saved = torch.load(exported.checkpoint, weights_only=True)["medconv"]["config"]["derived"]
    assert planned_as(file) == {"size": saved["size"], "slice_axis": saved["slice_axis"]}
    assert read(file)[1]["config"]["derived"]["class_names"] == saved["class_names"]


def test_a_header_of_others_is_no_metadata(tmp_path):
    for text in ("not json", "[" * 100_000, "3"):
        safetensors.save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors", {"medconv": text})
        assert read(tmp_path / "x.safetensors")[1] == {}
        assert planned_as(tmp_path / "x.safetensors") == {}


def test_the_command_says_what_is_left_to_do(exported, tmp_path):
    arguments = ("--checkpoint", str(exported.checkpoint), "--format", "safetensors", "--output", "organ")
    process = ranks.command("export", *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "add the license before you publish them" in process.stdout
