"""medconv/models/pretrained/hub.py: files from a server that answers as the Hugging Face Hub does."""

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from medconv.models.pretrained.hub import local_file

hub = pytest.importorskip("huggingface_hub")
CONTENT = b"some weights"
COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Has one file, `lab/heart/model.safetensors`, in each revision but `nowhere`."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(CONTENT)

    def _answer(self, body: bytes) -> None:
        if not self.path.startswith("/lab/heart/resolve/") or "nowhere" in self.path:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", hashlib.sha1(CONTENT).hexdigest())
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_path_stays_a_path() -> None:
    assert local_file("runs/a/best.ckpt") == Path("runs/a/best.ckpt")


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_a_file_is_downloaded_once(endpoint: ThreadingHTTPServer, revision: str) -> None:
    source = f"hf://lab/heart/model.safetensors{revision}"
    file = local_file(source)
    assert file.read_bytes() == CONTENT and file.name == "model.safetensors"
    endpoint.shutdown()
    endpoint.server_close()
    assert local_file(source) == file


def test_what_the_hub_does_not_have_is_named(endpoint: ThreadingHTTPServer) -> None:
    for source in ("hf://lab/lung/model.safetensors", "hf://lab/heart/model.safetensors@nowhere"):
        with pytest.raises(ValueError, match=rf"^{source}: the Hugging Face Hub does not give this file"):
            local_file(source)


def test_without_a_network_it_is_said_what_to_copy(endpoint: ThreadingHTTPServer) -> None:
    endpoint.shutdown()
    endpoint.server_close()
    with pytest.raises(ValueError, match=r"cannot be reached, and its cache does not have the file"):
        local_file("hf://lab/heart/model.safetensors")


@pytest.mark.parametrize(
    "source", ["hf://lab/heart/model.ckpt", "hf://heart/model.safetensors", "hf://lab/heart", "hf://"]
)
def test_pickles_and_incomplete_names_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"expected hf://OWNER/NAME/FILE\.safetensors"):
        local_file(source)
