"""How tests wait for what other processes and threads do: for the event, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Until what a test waits for counts as hanging; nothing that works takes so long, not even on a busy machine
PATIENCE_S = 600.0


def until(condition: Callable[[], Any], pause: float = 0.05) -> Any:
    """Returns: what the condition gives at last. Raises: AssertionError: it gave nothing for `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
    assert value
    return value
