"""A claim: what is said of a CUDA machine, the figures that show it, and the function that measures them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from gpu_checks.limits import Peaks
from gpu_checks.setting import Setting

GROUPS = ("smoke", "correctness", "speed", "layers", "memory", "data", "distributed")
NO_RATE = ("smoke", "correctness", "memory", "distributed")  # their claims are right or wrong
CHUNK_S = 540  # of one call of the command, where a machine is lent for ten minutes at a time
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Expect:
    """A figure that a claim needs.

    Args:
        least, most: what it must not be below or above; None: it is for information.
        limit: of the hardware, in the figure's unit: bytes over bandwidth, operations over peak.
        tiny: the expectation holds in the tiny form on a CPU as well.
    """

    name: str
    least: float | None = None
    most: float | None = None
    limit: Callable[[Peaks], float] | None = None
    tiny: bool = False

    def met(self, value: Any) -> bool:
        if self.least is None and self.most is None:
            return True
        if not isinstance(value, (int, float)) or not isfinite(value):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def words(self) -> str:
        """Such as `at least 0.9`; nothing where it is for information."""
        bounds = {"at least": self.least, "at most": self.most}
        return ", ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class Claim:
    """Args: text: for people. limit_s: seconds before its process is killed. measure: gives figures by name,
    in the order of the table; those without an `Expect` are for information. no_limit: why the hardware
    sets no limit; empty where an `Expect` has one.
    """

    name: str
    group: str
    text: str
    limit_s: float
    expects: tuple[Expect, ...]
    measure: Callable[[Setting], Figures]
    no_limit: str = ""

    def verdict(self, figures: Figures, tiny: bool) -> str:
        """`holds`, `missed`, or, in the tiny form, `ran`, as speed means nothing there."""
        judged = [expect for expect in self.expects if expect.tiny or not tiny]
        if not all(expect.met(figures.get(expect.name)) for expect in judged):
            return "missed"
        return "ran" if tiny else "holds"


def claim(
    name: str, text: str, *expects: Expect, limit_s: float, no_limit: str = ""
) -> Callable[[Callable[[Setting], Figures]], Claim]:
    """Makes a claim of the function that measures it; its group is its module.

    Args: no_limit: needed where no `Expect` has a limit, but in the groups of `NO_RATE`.
    """

    def made(measure: Callable[[Setting], Figures]) -> Claim:
        group = measure.__module__.rpartition(".")[2]
        no_rate = group in NO_RATE and not any(expect.limit for expect in expects)
        reason = no_limit or ("none: right or wrong, no rate" if no_rate else "")
        return Claim(name, group, text, limit_s, expects, measure, reason)

    return made


def of_group(group: str) -> list[Claim]:
    """In the order in which the module has them. Raises: whatever importing it raises."""
    module = importlib.import_module(f"gpu_checks.{group}")
    return [value for value in vars(module).values() if isinstance(value, Claim)]


class Skip(Exception):
    """A claim cannot be shown on this machine; the message says why, and what shows it elsewhere."""
