"""The output folder of a segmentation: a label map for each case, which several processes may share."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from medconv import doors
from medconv.data.case import Case
from medconv.data.io.formats import choice_of
from medconv.data.io.images import label_suffix
from medconv.data.io.writing import write_channels, write_label
from medconv.inference.output import TABLE, Claim, Output
from medconv.inference.predictor import Predictor
from medconv.inference.scores import LabelMapScores
from medconv.utils.locks import acquired

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
    earlier = "before or by others"

    def __init__(
        self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any], probabilities: bool = False
    ) -> None:
        settings = {**settings, "probabilities": probabilities}
        super().__init__(path, settings, about)
        self.logit_folder = path if probabilities else None
        # Also those of options that are not given now: what they wrote of a replaced case goes, too.
        self._folders = {**_FOLDERS, **doors.mapping(doors.PREDICTION_FOLDERS)}
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
