"""Exit codes of all commands."""

from __future__ import annotations

DONE, USER, BUG, PREEMPTED, INTERRUPTED = 0, 1, 70, 75, 130
