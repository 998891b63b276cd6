"""Exit codes of all commands."""

DONE, USER, BUG, PREEMPTED, INTERRUPTED = 0, 1, 70, 75, 130
