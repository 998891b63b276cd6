"""medconv/features/pretrained/hub.py: files from a server that answers as the Hugging Face Hub does."""

from pathlib import Path

import pytest
from helpers.hub import SOURCE, serving

from medconv.features.pretrained.hub import local_file

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
