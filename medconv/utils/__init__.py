"""Processes, files, signals, hardware and logging: nothing about images or networks."""

from medconv.utils.atomic_io import replacing, write_text
from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER
from medconv.utils.optional_imports import needed

__all__ = ["BUG", "DONE", "INTERRUPTED", "PREEMPTED", "USER", "needed", "replacing", "write_text"]
