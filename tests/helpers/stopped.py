"""A callback that sends a signal at a certain step, so that no test has to be quick."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from lightning import Callback


class Stopped(Callback):
    """Before a training step, the process sends a signal, once.

    Args:
        path: of a file that says that the signal was sent; where it is, none is sent.
        number: of the signal.
        step: steps that were done before.
        rank: of the process that sends it.
        to_parent: the parent process gets the signal, and the step begins once it has passed the signal on.
    """

    def __init__(
        self, path: str, number: int = signal.SIGKILL, step: int = 2, rank: int = 0, to_parent: bool = False
    ) -> None:
        self.path, self.number, self.step, self.rank = Path(path), number, step, rank
        self.to_parent = to_parent

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self.step or trainer.global_rank != self.rank or self.path.exists():
            return
        self.path.touch()
        if self.to_parent:
            _by_parent(self.number)
        else:
            os.kill(os.getpid(), self.number)


def _by_parent(number: int) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)  # written to as soon as a signal comes
    os.kill(os.getppid(), number)
    while os.read(reading, 1)[0] != number:
        pass
    signal.set_wakeup_fd(before)


def stopped(path: Path | str, **settings: Any) -> str:
    """The override that adds `Stopped` to a run."""
    values = ",".join(f"{name}:{str(value).lower()}" for name, value in settings.items())
    return f"+callbacks.stopped={{_target_:helpers.stopped.Stopped,path:'{path}',{values}}}"
