"""Exit codes of all commands."""

DONE = 0
USER = 1  # the user's input or configuration
BUG = 70  # ours
PREEMPTED = 75  # start the same command again
INTERRUPTED = 130  # by Ctrl-C
