"""The manifest of an output folder, `prediction.json`: the settings and the images of its predictions, and
why new predictions may not fit beside them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medconv.data.io.images import stamp

MANIFEST = "prediction.json"  # its name, beside the predictions
Entry = dict[str, Any]  # a case's images, as the manifest lists them
# settings that are known by hashes, which tell nobody anything
_HASHES = {"checkpoints": "another checkpoint", "postprocess": "another post-processing, or none"}


@dataclass(frozen=True)
class OutputState:
    """What an output folder holds when a process starts.

    Args:
        listed: the manifest's cases.
        overwriting: cases that an unfinished `--overwrite` replaces; those with a label map are done.
        differences: between the manifest's settings and the present ones.
        existing: cases with a result.
        busy: another process works there.
    """

    listed: dict[str, Entry]
    overwriting: list[str]
    differences: list[str]
    existing: list[str]
    busy: bool

    def changed(self, cases: dict[str, Entry]) -> list[str]:
        """Cases that were, or are being, predicted from other images."""
        predicted = (
            self.listed
            if self.busy
            else {case: self.listed[case] for case in self.existing if case in self.listed}
        )
        return [case for case, entry in cases.items() if case in predicted and predicted[case] != entry]

    def renewed(self, cases: dict[str, Entry]) -> set[str]:
        """Cases whose old results an unfinished `--overwrite` has removed already."""
        return set() if self.differences else {*self.overwriting} - {*self.changed(cases)}

    def conflict(self, cases: dict[str, Entry], replaced: Sequence[str]) -> str | None:
        """Why new results of `cases`, of which `replaced` exist and are made again, do not fit; None: they
        fit.
        """
        if self.differences and (self.existing or self.busy):
            return f"holds results made with other settings ({'; '.join(self.differences)})"
        if changed := self.changed(cases):
            return _other_image(changed[0], self.listed[changed[0]], cases[changed[0]])
        if self.busy and {*replaced} & {*self.existing}:
            return "holds results that --overwrite would replace"
        return None


def read(folder: Path) -> dict[str, Any]:
    """The folder's manifest; empty where there is none, or where it is damaged or of another version."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        assert isinstance(manifest["settings"], dict) and _names(manifest["overwriting"])
        assert _names(manifest.get("train_cases", []))
        for case in manifest["cases"].values():
            assert _names(case["images"]) and 0 < len(case["images"]) == len(case["stamps"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return {}
    return manifest


def entry(images: Sequence[Path]) -> Entry:
    """A case's images, with stamps that show when a file was replaced by another of the same name."""
    return {"images": [str(path.absolute()) for path in images], "stamps": [_stamp(path) for path in images]}


def _stamp(path: Path) -> list[int] | None:
    try:
        return stamp(path)
    except (OSError, ValueError):  # missing, or not a possible file name; such a case fails when it is read
        return None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that differ. Args: old: the manifest's. new: those of this command."""
    return [
        _HASHES.get(key, f"{key}: {old.get(key)} there, {new.get(key)} now")
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _other_image(case: str, before: Entry, now: Entry) -> str:
    for old, new in zip(before["images"], now["images"], strict=False):
        if old != new:
            return f"holds case {case} predicted from another image, {old}, not {new}"
    return f"holds case {case} predicted from an image that has changed since: {now['images'][0]}"
