"""A peer in its own process, and possibly its own environment, which works on request."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Thread
from typing import Any

NNUNET = (str(Path(__file__).with_name("nnunet_step.py")),)
SCRIPTS = Path(__file__).resolve().parents[2]  # the folder that the package `benchmarks` is imported from
DYNUNET = ("-m", "benchmarks.peers.dynunet")
NNUNET_DATA, TORCHIO_DATA = (
    (str(Path(__file__).with_name(f"{name}_data.py")),) for name in ("nnunet", "torchio")
)
MEDCONV_DATA, MONAI_DATA = (("-m", f"benchmarks.peers.{name}_data") for name in ("medconv", "monai"))
PATIENCE_S = 10.0  # for a peer to quit
KEPT_LINES = 6  # of its output, for a message


def importable() -> dict[str, str]:
    """This process's environment, in which `python -m benchmarks...` works from any folder."""
    paths = [str(SCRIPTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


class PeerProcess:
    """Starts a peer on entering and ends it on leaving; between requests the peer is idle.

        with PeerProcess(python, [*NNUNET, "--threads", "2"]) as peer:
            seconds = peer.step()

    Args:
        arguments: what that python runs, a script or `-m` and a module, then its options. It speaks the
            protocol of `scripts/benchmarks/peers/nnunet_step.py` or of `scripts/benchmarks/peers/serving.py`.
        python: executable of the environment that has the peer.
        limit_s: seconds to wait for one answer. Imports come before the first one, a compilation before the
            second.
        frozen: stop the peer and all that it started between its answers, such as a loader's worker that
            would go on filling its queue and take the core from the next peer.
    Attributes:
        about: what the peer says of itself: `name`; for a step also `parameters`, `precision`, `torch`,
            `threads`, `compiled`.
        loss: of the last step; not a number before.
    Raises: ValueError: on entering or by `step`, the peer cannot start, ends, is silent for too long or
        answers something else. The message names the executable and what the peer printed last.
    """

    def __init__(
        self, python: str | Path, arguments: Sequence[str], limit_s: float = 600.0, frozen: bool = False
    ) -> None:
        self.python, self.arguments, self.limit_s, self.frozen = str(python), list(arguments), limit_s, frozen
        self.about: dict[str, Any] = {}
        self.loss = float("nan")
        self._lines: SimpleQueue[str] = SimpleQueue()

    def __enter__(self) -> PeerProcess:
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # closed on leaving
        try:
            self._process = self._start()
            Thread(target=self._listen, daemon=True).start()
            self.about = self._answer("ready")
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_process"):
            self._end(PATIENCE_S)
        self._printed.close()

    def step(self) -> float:
        """Let the peer take one training step. Returns: its seconds, by the peer's own clock."""
        answer = self.ask("step")
        self.loss = float(answer["loss"])
        return float(answer["seconds"])

    def ask(self, request: str) -> dict[str, Any]:
        """Send the peer a request. Returns: its answer, with `seconds` by its own clock."""
        self._signal(signal.SIGCONT)
        self._tell(request)
        answer = self._answer("seconds")
        self._signal(signal.SIGSTOP)
        return answer

    def _start(self) -> Popen[str]:
        command = [self.python, *self.arguments]
        try:
            return Popen(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._printed,
                text=True,
                env=importable(),
                start_new_session=self.frozen,
            )
        except OSError as error:
            raise ValueError(f"needed a python executable, got {self.python}: {error}") from error

    def _signal(self, number: int) -> None:
        """Signal the peer and its child processes; only if they are their own process group."""
        if self.frozen:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: waiting for its answer raises the reason
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    def _answer(self, key: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self.limit_s)
        except Empty:
            raise self._error(f"gave no answer within {self.limit_s:g} s") from None
        if not line:
            raise self._error(f"ended with code {self._process.wait()}")
        with suppress(json.JSONDecodeError):
            answer = json.loads(line)
            if isinstance(answer, dict) and key in answer:
                return answer
        raise self._error(f"answered {line.strip()!r} where a JSON object with `{key}` was needed")

    def _error(self, what: str) -> ValueError:
        self._end(0.0)
        self._printed.seek(0)
        lines = [line.rstrip() for line in self._printed if line.strip()][-KEPT_LINES:]
        printed = "it printed last: " + "\n".join(lines) if lines else "it printed nothing"
        return ValueError(f"the peer `{self.python} {' '.join(self.arguments)}` {what}; {printed}")

    def _end(self, patience_s: float) -> None:
        """Let it quit by itself; kill it if that takes too long."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        if not self._process.stdin.closed:
            self._tell("quit")
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._signal(signal.SIGKILL)  # workers that it left behind
