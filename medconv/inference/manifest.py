"""What the record of a folder of predictions says: of which images, by which settings; and why that may
not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medconv.data.io.images import stamp

RECORD = "prediction.json"  # beside the predictions: what made them
Entry = dict[str, Any]  # a case's images, as the record has them


@dataclass(frozen=True)
class Found:
    """What a folder holds when a process begins.

    Args:
        before: the record's cases.
        overwriting: what an `--overwrite` is to replace that has not ended; of these, what has a label map is
            new.
        differences: of the record's settings from the wanted ones.
        there: cases with a label map.
        busy: another process is at work.
    """

    before: dict[str, Entry]
    overwriting: list[str]
    differences: list[str]
    there: list[str]
    busy: bool

    def moved(self, cases: dict[str, Entry]) -> list[str]:
        """Those that were, or are being, predicted from other images."""
        known = (
            self.before
            if self.busy
            else {case: self.before[case] for case in self.there if case in self.before}
        )
        return [case for case, entry in cases.items() if case in known and known[case] != entry]

    def renewed(self, cases: dict[str, Entry]) -> set[str]:
        """Whose old results an `--overwrite` that was stopped, or goes on, has removed already."""
        return set() if self.differences else {*self.overwriting} - {*self.moved(cases)}

    def fault(self, cases: dict[str, Entry], replaced: Sequence[str]) -> str | None:
        """Why it cannot stay as it is beside new results of `cases`, of which `replaced` are to be made
        anew.
        """
        if self.differences and (self.there or self.busy):
            return f"holds results that were made otherwise ({'; '.join(self.differences)})"
        if moved := self.moved(cases):
            return _other_image(moved[0], self.before[moved[0]], cases[moved[0]])
        if self.busy and {*replaced} & {*self.there}:
            return "holds results that --overwrite would replace"
        return None


def read(folder: Path) -> dict[str, Any]:
    """Empty where there is none, or one of an earlier version, or none that can be read."""
    try:
        known = dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))
        assert isinstance(known["settings"], dict) and _names(known["overwriting"])
        for one in known["cases"].values():
            assert _names(one["images"]) and 0 < len(one["images"]) == len(one["stamps"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return {}
    return known


def entry(images: Sequence[Path]) -> Entry:
    """A case's images, with what tells that a file was replaced by another of its name."""
    return {"images": [str(path.absolute()) for path in images], "stamps": [_stamp(path) for path in images]}


def _stamp(path: Path) -> list[int] | None:
    try:
        return stamp(path)
    except (OSError, ValueError):  # not there, or no possible name; such a case fails when it is read
        return None


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys([*here, *there])
    return [
        f"{key}: {there.get(key)} there, {here.get(key)} now"
        for key in keys
        if there.get(key) != here.get(key)
    ]


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _other_image(case: str, before: Entry, now: Entry) -> str:
    for old, new in zip(before["images"], now["images"], strict=False):
        if old != new:
            return f"holds a case {case} of another image, {old}, not {new}"
    return (
        f"holds a case {case} of an image that was replaced since, or has other channels now: "
        f"{now['images'][0]}"
    )
