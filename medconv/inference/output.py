"""The output folder: its manifest, which cases are done, whether new predictions fit beside old ones.

The manifest, `prediction.json`, says which networks and settings made the predictions. A process that works
in the folder holds a file lock, which the operating system releases when the process ends, even if it is
killed. Several processes may share a folder of label maps.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from filelock import FileLock

from medconv import doors
from medconv.data.case import Case
from medconv.data.io.formats import choice_of
from medconv.data.io.images import label_suffix, stamp
from medconv.data.io.writing import write_channels, write_label
from medconv.inference.predictor import Predictor
from medconv.inference.slab_answer import LabelMapScores
from medconv.utils.atomic_io import write_text
from medconv.utils.errors import ArgumentError
from medconv.utils.locks import Claims, acquired, held
from medconv.utils.logging import some

# Its name, beside the predictions.
MANIFEST = "prediction.json"
# A case's images, as the manifest lists them.
Entry = dict[str, Any]
# Settings that are known by their hashes alone, which tell a reader nothing.
_HASHES = {"checkpoints": "another checkpoint", "postprocess": "another post-processing, or none"}


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


def read_manifest(folder: Path) -> dict[str, Any]:
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


def case_entry(images: Sequence[Path]) -> Entry:
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


TABLE = "predictions.csv"  # in a folder of answers that are no images


class Claim(NamedTuple):
    """A case that this process alone predicts.

    Args:
        release: to be called when the case is done or has failed.
    """

    case: Case
    release: Callable[[], None]


class ReplaceableResultsError(ArgumentError):
    """The output folder holds other results, which `overwrite` would replace.

    Args:
        folder: the output folder.
        conflict: what it holds.
    """

    def __init__(self, folder: Path, conflict: str) -> None:
        super().__init__(
            "output", f" {folder}: {conflict}; take another folder, or overwrite=True to replace them"
        )
        self.folder = folder
        self.conflict = conflict


class Output(ABC):
    """Where predictions go.

    Args:
        path: the folder.
        settings: what determines the predictions, by name; they are the same for all of a folder.
        about: what else the manifest says; of `train_cases`, those that are cases of the folder.

    Attributes:
        result_name: what the folder holds, for messages.
        skipped: cases that `claims` did not give, since they are done.
        claimed_by_others: cases that `claims` did not give, since other processes work on them.
        logit_folder: `write` takes scores that keep all logits of a case in a file there; None: not needed.
    """

    result_name: ClassVar[str]

    def __init__(self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)
        # As the manifest gives them back: tuples become lists.
        self.settings = json.loads(json.dumps(settings))
        self.skipped: list[str] = []
        self.claimed_by_others: list[str] = []
        self.logit_folder: Path | None = None
        self._entries: dict[str, Entry] = {}  # of the cases to predict, when the prediction began
        self._lock = FileLock(path / ".lock")
        self._claims = Claims(path / ".claims")

    @property
    def target(self) -> Path:
        """The file or folder with the predictions."""
        return self.path

    @abstractmethod
    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        """Cases to predict, one after the other."""

    @abstractmethod
    def write(self, predictor: Any, case: Case, scores: Any) -> None:
        """Write a case's prediction, from what `predictor.scores` gave.

        Files beside it come first, so that a case with a prediction is done.
        Raises:
            OSError: the disk is full, or no permission.
        """

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """Register this process as working here, until the context ends.

        Args:
            overwrite: results of `cases` that the manifest lists are removed.
        Raises:
            ArgumentError: it holds other results, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with held(self._lock):
                self._entries = {case.id: case_entry(case.images) for case in cases}
                self._begin(self._entries, overwrite)
        # NotImplementedError: a file system without locks.
        except (OSError, NotImplementedError) as error:
            cause = getattr(error, "strerror", None) or error
            raise self._refusal(f"cannot be written ({cause})") from error
        completed = False
        try:
            yield
            completed = True
        finally:
            with held(self._lock):
                self._end(completed)

    def check_unchanged(self, case: Case) -> None:
        """Check that a case's images are those of the beginning: its result gets the grid of the file now.

        Raises: ValueError: one was replaced or removed since `open`.
        """
        stamps = case_entry(case.images)["stamps"]
        for path, before, now in zip(case.images, self._entries[case.id]["stamps"], stamps, strict=True):
            if now != before:
                raise ValueError(f"{path}: was replaced or removed while it was predicted; predict it again")

    @abstractmethod
    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        """Cases with a prediction. Raises: ValueError: predictions of another kind are here."""

    @abstractmethod
    def _clean(self, replaced: Sequence[str]) -> None:
        """Remove what killed processes left, and the predictions of these cases."""

    def _prediction_name(self, case_id: str) -> str:
        """A case's prediction, for messages."""
        return case_id

    def _begin(self, cases: dict[str, Entry], overwrite: bool) -> None:
        state = self._state()
        renewed = state.renewed(cases)
        replaced = [case_id for case_id in cases if case_id not in renewed] if overwrite else []
        self._check(state, cases, overwrite, replaced)
        if not state.busy:
            self._clean(replaced)
        # Entries of results made with other settings would make these count as done.
        previous = {} if state.differences else state.listed
        self._write_manifest({**previous, **cases}, sorted({*renewed, *replaced}))
        self._claims.join()

    def _check(
        self, state: OutputState, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]
    ) -> None:
        """Raises: ArgumentError: existing results do not fit beside new ones, and must not be replaced."""
        unlisted = [case_id for case_id in state.existing if case_id not in state.listed]
        if unlisted:
            raise self._refusal(
                f"holds {self.result_name} that {MANIFEST} does not list, such as "
                f"{self._prediction_name(unlisted[0])}; take another folder, or remove them"
            )
        conflict = state.conflict(cases, replaced)
        if conflict and state.busy:
            raise self._refusal(f"{conflict}; another process is writing there")
        if conflict and not overwrite:
            raise ReplaceableResultsError(self.path, conflict)
        kept = [case_id for case_id in state.existing if case_id not in cases]
        if state.differences and kept:
            raise self._refusal(
                "to overwrite would keep results made with other settings, of cases that are not in the "
                f"input: {some(kept)}; take another folder"
            )

    def _refusal(self, reason: str) -> ArgumentError:
        return ArgumentError("output", f" {self.path}: {reason}")

    def _end(self, completed: bool) -> None:
        """Leave the folder; the last process that completed all its cases ends an unfinished overwrite.

        Args:
            completed: this process did all its cases.
        """
        if not self._claims.leave():
            return
        manifest = read_manifest(self.path) if completed else {}
        if manifest.get("overwriting"):
            # A full disk: all cases are done nevertheless.
            with suppress(OSError):
                self._write_manifest(manifest["cases"], [])

    def _write_manifest(self, cases: dict[str, Entry], overwriting: Sequence[str]) -> None:
        train_cases = [case_id for case_id in self.about.get("train_cases", ()) if case_id in cases]
        manifest = {
            **self.about,
            "train_cases": train_cases,
            "settings": self.settings,
            "cases": cases,
            "overwriting": list(overwriting),
        }
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def _state(self) -> OutputState:
        manifest = read_manifest(self.path)
        return OutputState(
            listed=manifest.get("cases", {}),
            overwriting=manifest.get("overwriting", []),
            differences=differences(manifest["settings"], self.settings) if manifest else [],
            existing=self._existing(manifest),
            busy=self._claims.is_shared(),
        )


PROBABILITIES = "probabilities"
_VOLUME = ".nii.gz"
# Beside the label maps, with the suffix of their files.
_FOLDERS = {PROBABILITIES: _VOLUME}
# A temporary file of `atomic_io.replacing`, left by a killed process.
_PARTIAL = re.compile(r"\.\d+\..*")


class OutputDir(Output):
    """Where label maps go; a case is done once its label map exists.

    They are PNG files if all images are pictures (PNG, JPEG and the like), and MetaImage (`.mha`) if all
    images are; else NIfTI.

    Args:
        path: the folder.
        settings: as in `Output`.
        about: as in `Output`.
        probabilities: whether they are written, too.
    """

    result_name = "label maps"

    def __init__(
        self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any], probabilities: bool = False
    ) -> None:
        settings = {**settings, "probabilities": probabilities}
        super().__init__(path, settings, about)
        self.logit_folder = path if probabilities else None
        # Also those of options that are not given now: what they wrote of a replaced case goes, too.
        self._folders = dict(_FOLDERS)
        for option in doors.mapping(doors.PREDICT_OPTIONS).values():
            self._folders |= option["folders"]
        # Of label maps; `open` chooses it by the cases.
        self._suffix = _VOLUME

    def label(self, case_id: str) -> Path:
        return self.path / f"{case_id}{self._suffix}"

    def beside(self, folder: str, case_id: str) -> Path:
        """A case's file in one of the folders beside the label maps."""
        return self.path / folder / f"{case_id}{self._folders[folder]}"

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """As in `Output`. Raises: ArgumentError: it holds the images themselves."""
        images = [path for case in cases for path in case.images]
        self._suffix = label_suffix(images)
        self._check_apart(images)
        with super().open(cases, overwrite):
            yield

    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        """Cases that another process works on are tried again at the end, and then skipped."""
        postponed: list[Case] = []
        for is_second_pass, remaining in ((False, cases), (True, postponed)):
            for case in remaining:
                lock = self._claims.lock(case.id)
                if self._claimed(case, lock):
                    yield Claim(case, lock.release)
                elif self.label(case.id).exists():
                    self.skipped.append(case.id)
                elif is_second_pass:
                    self.claimed_by_others.append(case.id)
                else:
                    postponed.append(case)

    @torch.inference_mode()
    def write(self, predictor: Predictor, case: Case, scores: LabelMapScores) -> None:
        label = predictor.answer(scores)
        image = case.images[0]
        if scores.kept is not None:
            path = self.beside(PROBABILITIES, case.id)
            write_channels(path, scores.probabilities(), predictor.targets.num_outputs, image)
        for extra in predictor.extras:
            extra.write(self.path, predictor, case, scores, label)
        # The label map comes last: a case that has one counts as done.
        write_label(self.label(case.id), label, image)

    def _claimed(self, case: Case, lock: FileLock) -> bool:
        """Whether this process now holds the case's lock, and the case is not done."""
        if self.label(case.id).exists() or not acquired(lock):
            return False
        # Another process may have written it in between.
        if self.label(case.id).exists():
            lock.release()
            return False
        return True

    def _check_apart(self, images: Sequence[Path]) -> None:
        """Raises: ArgumentError: results would be written into a folder of images. Folders are compared by
        identity, not by path, since links give one folder several paths."""
        folders = [self.path, *(self.path / name for name in self._folders)]
        outputs = {_identity(folder) for folder in folders} - {None}
        for path in images:
            if outputs & _folders_of(path):
                raise self._refusal(f"holds the images themselves, such as {path}; take another folder")

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        if (self.path / TABLE).exists():
            raise self._refusal(f"holds {TABLE}; take another folder")
        names = [path.name for path in self.path.glob(f"*{self._suffix}")]
        return sorted(name.removesuffix(self._suffix) for name in names if not name.startswith("."))

    def _prediction_name(self, case_id: str) -> str:
        return f"{case_id}{self._suffix}"

    def _clean(self, replaced: Sequence[str]) -> None:
        suffixes = {"": self._suffix, **self._folders}
        for folder, suffix in suffixes.items():
            for path in list((self.path / folder).glob(f".*{suffix}")):
                if _PARTIAL.fullmatch(path.name):
                    path.unlink()
        for case_id in replaced:
            self.label(case_id).unlink(missing_ok=True)
            for folder in self._folders:
                self.beside(folder, case_id).unlink(missing_ok=True)


def _folders_of(image: Path) -> set[tuple[int, int] | None]:
    """Identities of the folder in the path, of the real folder if the path is a link, and of the path itself,
    which is a folder for a DICOM series.
    """
    image, _ = choice_of(image)
    try:
        real = Path(os.path.realpath(image))
        return {_identity(image.parent), _identity(real.parent), _identity(image)}
    # Not a possible file name; such a case fails when it is read.
    except ValueError:
        return set()


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode, which are the same for all paths of a folder; None: it does not exist."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
