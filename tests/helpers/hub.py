"""A server that answers as the Hugging Face Hub does; it has one file, `lab/heart/model.safetensors`."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

SOURCE = "hf://lab/heart/model.safetensors"
_COMMIT = "0" * 40


def _handler(content: bytes) -> type[BaseHTTPRequestHandler]:
    class Hub(BaseHTTPRequestHandler):
        """Has the file in each revision but `nowhere`."""

        def do_HEAD(self) -> None:
            self._answer(b"")

        def do_GET(self) -> None:
            self._answer(content)

        def _answer(self, body: bytes) -> None:
            if not self.path.startswith("/lab/heart/resolve/") or "nowhere" in self.path:
                is_gated = "gated" in self.path
                self.send_response(403 if is_gated else 404)
                self.send_header("X-Error-Code", "GatedRepo" if is_gated else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("ETag", hashlib.sha1(content).hexdigest())
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on standard error."""

    return Hub


@contextmanager
def serving(content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """Inside, huggingface_hub asks this server. Args: cache: an empty folder."""
    hub = pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(content))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(cache))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
