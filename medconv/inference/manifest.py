"""The manifest of an output folder, `prediction.json`: the settings and the images of its predictions, and
why new predictions may not fit beside them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medconv.data.io.images import stamp

# Its name, beside the predictions.
MANIFEST = "prediction.json"
# A case's images, as the manifest lists them.
Entry = dict[str, Any]
# Settings that are known by their hashes alone, which tell a reader nothing.
_HASHES = {"checkpoints": "another checkpoint", "post-processing": "another post-processing, or none"}


@dataclass(frozen=True)
class OutputState:
    """What an output folder holds when a process starts.

    Args:
        listed: the manifest's cases.
        overwriting: cases that an unfinished overwrite replaces; those with a label map are done.
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
        predicted = self.listed
        if not self.busy:
            predicted = {case_id: self.listed[case_id] for case_id in self.existing if case_id in self.listed}
        return [
            case_id
            for case_id, images in cases.items()
            if case_id in predicted and predicted[case_id] != images
        ]

    def renewed(self, cases: dict[str, Entry]) -> set[str]:
        """Cases whose old results an unfinished overwrite has removed already."""
        if self.differences:
            return set()
        return set(self.overwriting) - set(self.changed(cases))

    def conflict(self, cases: dict[str, Entry], replaced: Sequence[str]) -> str | None:
        """Why new results do not fit; None: they fit.

        Args:
            cases: to be predicted.
            replaced: those of them whose results are made again.
        """
        if self.differences and (self.existing or self.busy):
            return f"holds results made with other settings ({'; '.join(self.differences)})"
        changed = self.changed(cases)
        if changed:
            case_id = changed[0]
            return _other_image(case_id, self.listed[case_id], cases[case_id])
        if self.busy and set(replaced) & set(self.existing):
            return "holds results that would be overwritten"
        return None


def read(folder: Path) -> dict[str, Any]:
    """The folder's manifest; empty where there is none, or where it is damaged or of another version."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        assert isinstance(manifest["settings"], dict)
        assert _are_names(manifest["overwriting"])
        assert _are_names(manifest.get("train_cases", []))
        for case in manifest["cases"].values():
            assert _are_names(case["images"])
            assert 0 < len(case["images"]) == len(case["stamps"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return {}
    return manifest


def entry(images: Sequence[Path]) -> Entry:
    """A case's images, with stamps that show when a file was replaced by another of the same name."""
    return {"images": [str(path.absolute()) for path in images], "stamps": [_stamp(path) for path in images]}


def _stamp(path: Path) -> list[int] | None:
    try:
        return stamp(path)
    # Missing, or not a possible file name; such a case fails when it is read.
    except (OSError, ValueError):
        return None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that differ, in words.

    Args:
        old: the manifest's.
        new: the present ones.
    """
    # Without repetitions.
    names = dict.fromkeys([*new, *old])
    return [
        _HASHES.get(name, f"{name}: {old.get(name)} there, {new.get(name)} now")
        for name in names
        if old.get(name) != new.get(name)
    ]


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _other_image(case_id: str, before: Entry, now: Entry) -> str:
    for old, new in zip(before["images"], now["images"], strict=False):
        if old != new:
            return f"holds case {case_id} predicted from another image, {old}, not {new}"
    return f"holds case {case_id} predicted from an image that has changed since: {now['images'][0]}"
