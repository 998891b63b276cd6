"""Cases that no file belongs to, to be split."""

from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case


def some_cases(count: int) -> list[Case]:
    return [Case(f"case_{i:03d}", (Path(f"case_{i:03d}.nii.gz"),)) for i in range(count)]


def ids(cases: Sequence[Case]) -> list[str]:
    return [case.id for case in cases]
