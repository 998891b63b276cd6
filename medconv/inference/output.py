"""The output folder: its manifest, which cases are done, whether new predictions fit beside old ones.

The manifest, `prediction.json`, says which networks and settings made the predictions. A process that works
in the folder holds a file lock, which the operating system releases when the process ends, even if it is
killed. Several processes may share a folder of label maps.
"""

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from os.path import realpath
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from filelock import FileLock

from medconv import doors
from medconv.data.case import Case
from medconv.data.io.formats import choice_of
from medconv.data.io.images import label_suffix, stamp, suffixes
from medconv.data.io.manifest import LOWER_BOUNDS, MANIFEST, TABLE, read_manifest
from medconv.data.io.writing import write_channels, write_label
from medconv.inference.predictor import Predictor
from medconv.inference.slab_answer import LabelMapScores
from medconv.utils.atomic_io import write_text
from medconv.utils.errors import ArgumentError, reason
from medconv.utils.locks import Claims, acquired, held
from medconv.utils.logging import some

# A case's images, as the manifest lists them.
Entry = dict[str, Any]
# Settings that are known by their hashes alone, which tell a reader nothing.
_HASHES = {"checkpoints": "another checkpoint", "postprocess": "another post-processing, or none"}


@dataclass(frozen=True)
class OutputState:
    """What an output folder holds when a process starts.

    Args:
        listed: the manifest's cases.
        differences: between the manifest's settings and the present ones.
        existing: cases with a result.
        busy: another process works there.
        changed: cases that were, or are being, predicted from other images.
    """

    listed: dict[str, Entry]
    differences: list[str]
    existing: list[str]
    busy: bool
    changed: list[str]


def manifest_entry(images: Sequence[Path]) -> Entry:
    """A case's images, with stamps that show when a file was replaced by another of the same name."""
    stamps: list[list[int] | None] = []
    for path in images:
        try:
            stamps.append(stamp(path))
        # Missing, or not a possible file name; such a case fails when it is read.
        except (OSError, ValueError):
            stamps.append(None)
    return {"images": [str(path.absolute()) for path in images], "stamps": stamps}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that differ, in words.

    Args:
        old: the manifest's.
        new: the present ones.
    """
    # Without repetitions.
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    if "checkpoints" in names:  # of another number of networks, each with the same setting
        names = [name for name in names if name == "checkpoints" or _each(old, name) != _each(new, name)]
    return [_HASHES.get(name, f"{name}: {old.get(name)} there, {new.get(name)} now") for name in names]


def _each(settings: Mapping[str, Any], name: str) -> Any:
    """The different values of a list that has one for each network; any other value as it is."""
    value = settings.get(name)
    networks = settings.get("checkpoints")
    if not isinstance(value, list) or not isinstance(networks, list) or len(value) != len(networks):
        return value
    return sorted({repr(entry) for entry in value})


def _same_images(before: Entry, now: Entry) -> bool:
    """Whether these are the same files as they were, maybe by other paths to them."""
    if before["stamps"] != now["stamps"] or len(before["images"]) != len(now["images"]):
        return False
    pairs = zip(before["images"], now["images"], strict=True)
    return all(old == new or realpath(old) == realpath(new) for old, new in pairs)


def _are_bounded(existing: Sequence[str], manifest: Mapping[str, Any]) -> bool:
    """Whether the bounds of the manifest are of all cases with a result; False: it has none."""
    bounds = manifest.get(LOWER_BOUNDS)
    cases = bounds.get("cases") if isinstance(bounds, Mapping) else None
    return isinstance(cases, Mapping) and set(existing) <= set(cases)


def _other_image(case_id: str, before: Entry, now: Entry) -> str:
    for old, new in zip(before["images"], now["images"], strict=False):
        if realpath(old) != realpath(new):
            return f"holds case {case_id} predicted from another image, {old}, not {new}"
    return f"holds case {case_id} predicted from an image that has changed since: {now['images'][0]}"


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
        target: the file or folder with the predictions.
        result_name: what the folder holds, for messages.
        skipped: cases that `claims` did not give, since they are done.
        claimed_by_others: cases that `claims` did not give, since other processes work on them.
        logit_folder: `write` takes scores that keep all logits of a case in a file there; None: not needed.
    """

    result_name: ClassVar[str]

    def __init__(self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.path = path
        self.target = path
        self.about = dict(about)
        # As the manifest gives them back: tuples become lists.
        self.settings = json.loads(json.dumps(settings))
        self.skipped: list[str] = []
        self.claimed_by_others: list[str] = []
        self.logit_folder: Path | None = None
        self._entries: dict[str, Entry] = {}  # of the cases to predict, when the prediction began
        self._lock = FileLock(path / ".lock")
        self._claims = Claims(path / ".claims")

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
        self._see([path for case in cases for path in case.images])
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # One process at a time looks at the folder and changes its manifest.
            with held(self._lock):
                self._entries = {case.id: manifest_entry(case.images) for case in cases}
                self._begin(self._entries, overwrite)
        # NotImplementedError: a file system without locks.
        except (OSError, NotImplementedError) as error:
            raise self._refusal(f"cannot be written ({reason(error)})") from error
        completed = False
        try:
            yield
            completed = True
        finally:
            with held(self._lock):
                was_last = self._claims.leave()
                # The last process that completed all its cases ends an unfinished overwrite.
                manifest = read_manifest(self.path) if completed else {}
                lacks_bounds = LOWER_BOUNDS in manifest and not _are_bounded(
                    self._existing(manifest), manifest
                )
                if lacks_bounds or (was_last and manifest.get("overwriting")):
                    # A full disk: all cases are done nevertheless.
                    with suppress(OSError):
                        unfinished = [] if was_last else manifest["overwriting"]
                        self._write_manifest(manifest["cases"], unfinished)

    def check_unchanged(self, case: Case) -> None:
        """Check that a case's images are those of the beginning: its result gets the grid of the file now.

        Raises: ValueError: one was replaced or removed since `open`.
        """
        stamps = manifest_entry(case.images)["stamps"]
        for path, before, now in zip(case.images, self._entries[case.id]["stamps"], stamps, strict=True):
            if now != before:
                raise ValueError(f"{path}: was replaced or removed while it was predicted; predict it again")

    @abstractmethod
    def _see(self, images: Sequence[Path]) -> None:
        """Look at the images to predict, before anything is written."""

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
        """Look at what is here, refuse what does not fit, remove what is replaced, and write the manifest."""
        # What is here, and whether it was made from the same images.
        manifest = read_manifest(self.path)
        listed = manifest.get("cases", {})
        existing = self._existing(manifest)
        busy = self._claims.is_shared()
        # Another process may be predicting any of the listed cases.
        predicted = listed.keys() if busy else listed.keys() & set(existing)
        state = OutputState(
            listed=listed,
            differences=differences(manifest["settings"], self.settings) if manifest else [],
            existing=existing,
            busy=busy,
            changed=[
                each for each in cases if each in predicted and not _same_images(listed[each], cases[each])
            ],
        )
        # An unfinished overwrite has removed the old results of these; those with a result are done.
        renewed: set[str] = set()
        if not state.differences:
            renewed = set(manifest.get("overwriting", ())) - set(state.changed)
        replaced = [case_id for case_id in cases if case_id not in renewed] if overwrite else []
        # In a new folder nothing can conflict.
        if existing or listed or busy:
            self._check(state, cases, overwrite, replaced)
        if not busy:
            self._clean(replaced)
        # Entries of results made with other settings would make these count as done.
        previous = {} if state.differences else listed
        # What was computed of all results stays as long as they do, see `open`
        stays = not state.differences and not renewed and not replaced and _are_bounded(existing, manifest)
        kept = {LOWER_BOUNDS: manifest[LOWER_BOUNDS]} if stays else {}
        self._write_manifest({**previous, **cases}, sorted({*renewed, *replaced}), kept)
        self._claims.join()

    def _check(
        self, state: OutputState, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]
    ) -> None:
        """Raises: ArgumentError: existing results do not fit beside new ones, and must not be replaced."""
        # Somebody else's files, which must neither count as done nor be replaced.
        unlisted = [case_id for case_id in state.existing if case_id not in state.listed]
        if unlisted:
            raise self._refusal(
                f"holds {self.result_name} that {MANIFEST} does not list, such as "
                f"{self._prediction_name(unlisted[0])}; take another folder, or remove them"
            )
        conflict = None
        if state.differences and (state.existing or state.busy):
            conflict = f"holds results made with other settings ({'; '.join(state.differences)})"
        elif state.changed:
            case_id = state.changed[0]
            conflict = _other_image(case_id, state.listed[case_id], cases[case_id])
        elif state.busy and set(replaced) & set(state.existing):
            conflict = "holds results that would be overwritten"
        # The other process relies on what it found.
        if conflict and state.busy:
            raise self._refusal(f"{conflict}; another process is writing there")
        if conflict and not overwrite:
            raise ReplaceableResultsError(self.path, conflict)
        # One manifest describes all results of a folder.
        kept = [case_id for case_id in state.existing if case_id not in cases]
        if state.differences and kept:
            raise self._refusal(
                "to overwrite would keep results made with other settings, of cases that are not in the "
                f"input: {some(kept)}; take another folder"
            )

    def _refusal(self, reason: str) -> ArgumentError:
        return ArgumentError("output", f" {self.path}: {reason}")

    def _write_manifest(
        self, cases: dict[str, Entry], overwriting: Sequence[str], kept: Mapping[str, Any] | None = None
    ) -> None:
        # `medconv evaluate` warns of these.
        train_cases = [case_id for case_id in self.about.get("train_cases", ()) if case_id in cases]
        manifest = {
            **self.about,
            "train_cases": train_cases,
            "settings": self.settings,
            "cases": cases,
            "overwriting": list(overwriting),
            **(kept or {}),
        }
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")


PROBABILITIES = "probabilities"
_VOLUME = ".nii.gz"
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
    own_suffix: str = ""  # of results that are no label maps, whatever the format of the images

    def __init__(
        self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any], probabilities: bool = False
    ) -> None:
        settings = {**settings, "probabilities": probabilities}
        super().__init__(path, settings, about)
        self.logit_folder = path if probabilities else None
        # Also those of options that are not given now: what they wrote of a replaced case goes, too.
        self._folders = {PROBABILITIES: _VOLUME}  # beside the label maps: suffix of their files
        for option in doors.mapping(doors.PREDICT_OPTIONS).values():
            self._folders |= option["folders"]
        # Of label maps; `open` chooses it by the cases.
        self._suffix = self.own_suffix or _VOLUME

    def label(self, case_id: str) -> Path:
        return self.path / f"{case_id}{self._suffix}"

    def beside(self, folder: str, case_id: str) -> Path:
        """A case's file, or its folder of files, in one of the folders beside the label maps."""
        return self.path / folder / f"{case_id}{self._folders[folder]}"

    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        """Cases that another process works on are tried again at the end, and then skipped."""
        postponed: list[Case] = []
        passes = chain(((case, False) for case in cases), ((case, True) for case in postponed))
        for case, is_second_pass in passes:
            path = self.label(case.id)
            lock = self._claims.lock(case.id)
            if not path.exists() and acquired(lock):
                if not path.exists():
                    yield Claim(case, lock.release)
                    continue
                # Another process has written it in between.
                lock.release()
            if path.exists():
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

    def _see(self, images: Sequence[Path]) -> None:
        """Label maps get the format of the images.

        Raises: ArgumentError: results would be written into a folder of images.
        """
        self._suffix = self.own_suffix or label_suffix(images)
        # Folders are compared by identity, not by path, since links give one folder several paths.
        ours = [self.path / name for name in ("", *self._folders)]
        outputs = {_identity(folder) for folder in ours if folder.exists()} - {None}
        for path in images if outputs else ():
            image, _ = choice_of(path)
            # Its folder, also the real one if it is a link; a DICOM series is a folder itself.
            try:
                folders = (image.parent, Path(os.path.realpath(image)).parent, image)
            # Not a possible file name; such a case fails when it is read.
            except ValueError:
                continue
            if outputs & set(map(_identity, folders)):
                raise self._refusal(f"holds the images themselves, such as {path}; take another folder")

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        if (self.path / TABLE).exists():
            raise self._refusal(f"holds {TABLE}; take another folder")
        return self._label_maps(manifest)

    def _label_maps(self, manifest: Mapping[str, Any]) -> list[str]:
        """Cases that have one. Raises: ArgumentError: one of the manifest has another format."""
        for case_id in manifest.get("cases", ()):
            for suffix in suffixes():
                if suffix != self._suffix and (self.path / f"{case_id}{suffix}").is_file():
                    name = f"{case_id}{suffix}"
                    raise self._refusal(f"holds {name}, not *{self._suffix}; take another folder")
        names = [path.name for path in self.path.glob(f"*{self._suffix}")]
        return sorted(name.removesuffix(self._suffix) for name in names if not name.startswith("."))

    def _prediction_name(self, case_id: str) -> str:
        return f"{case_id}{self._suffix}"

    def _clean(self, replaced: Sequence[str]) -> None:
        for folder, suffix in {"": self._suffix, **self._folders}.items():
            pattern = f".*{suffix}" if suffix else "*/.*"
            for path in list((self.path / folder).glob(pattern)):
                if _PARTIAL.fullmatch(path.name):
                    path.unlink()
        for case_id in replaced:
            self.label(case_id).unlink(missing_ok=True)
            for folder in self._folders:
                path = self.beside(folder, case_id)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode, which are the same for all paths of a folder; None: it does not exist."""
    try:
        stat = folder.stat()
    # ValueError: not a possible file name.
    except (OSError, ValueError):
        return None
    return stat.st_dev, stat.st_ino
