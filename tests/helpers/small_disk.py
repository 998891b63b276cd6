"""A disk of some size, for one call in a fork of this process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

FORK = multiprocessing.get_context("fork")
_NEW_MOUNTS_OF_A_NEW_USER = 0x20000 | 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_REFUSED = 77


def on_small_disk(folder: Path, size: str, call: Callable[[], object]) -> None:
    """Calls where a disk of so many bytes, such as `4m`, is mounted on the folder; nobody else sees it. Skips the
    test where this is not allowed.
    """
    folder.mkdir(exist_ok=True)
    process = FORK.Process(target=_mounted, args=(folder, size, call))
    process.start()
    process.join()
    if process.exitcode == _REFUSED:
        pytest.skip("no small disk can be mounted here")
    assert process.exitcode == 0


def _mounted(folder: Path, size: str, call: Callable[[], object]) -> None:
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS_OF_A_NEW_USER):
        os._exit(_REFUSED)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        os._exit(_REFUSED)
    call()
