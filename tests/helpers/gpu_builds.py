"""Builds Triton kernels for a GPU that is not there: what a launch would compile, with its registers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

MULTIPROCESSORS = {80: 108, 90: 132}  # of an A100 and an H100
_REGISTERS = 65536  # of a multiprocessor
_THREADS = 2048


@dataclass(frozen=True)
class Build:
    """A kernel that a launch would run.

    Args:
        kernel: its name.
        grid: programs along each axis.
        arch: 80 or 90.
        registers: of a thread.
        spilled: bytes of a thread in local memory.
        threads: of a program.
        loads: widest load from global memory, in bytes.
    """

    kernel: str
    grid: tuple[int, ...]
    arch: int
    registers: int
    spilled: int
    threads: int
    loads: int

    @property
    def resident(self) -> int:
        """Programs that the GPU runs at once; registers are given to warps by 256."""
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(_REGISTERS // registers, _THREADS // self.threads) * MULTIPROCESSORS[self.arch]


class _Device:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # Triton keeps what it compiled by device

    def get_current_stream(self, device: Any) -> int:
        return 0


def builds(run: Callable[[], object], arch: int, folder: Path) -> list[Build]:
    """Every kernel that `run` launches on CPU tensors; nothing is computed.

    Args:
        folder: for files.
    """
    found: list[Build] = []
    with _compiling(arch, lambda compiled, grid: found.append(_measured(compiled, grid, arch, folder))):
        run()
    return found


@contextmanager
def _compiling(arch: int, take: Callable[[Any, tuple[int, ...]], None]) -> Iterator[None]:
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        take(compiled, grid)
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", _Device(arch))
        yield


def _measured(compiled: Any, grid: tuple[int, ...], arch: int, folder: Path) -> Build:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    return Build(
        kernel=compiled.metadata.name,
        grid=grid,
        arch=arch,
        registers=numbers["REG"],
        spilled=numbers["STACK"] + numbers["LOCAL"],
        threads=32 * compiled.metadata.num_warps,
        loads=max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0),
    )
