"""The output folder of a segmentation: a label map for each case, which several processes may share."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from medconv.data.case import Case
from medconv.data.io import dicom_seg as data_dicom_seg
from medconv.data.io.dicom_headers import choice_of
from medconv.data.io.images import write_channels, write_label
from medconv.data.io.raster import is_picture
from medconv.inference import quality as inference_quality
from medconv.inference.forward import LabelMapScores, with_cpu_fallback
from medconv.inference.output import Claim, Output, acquired
from medconv.inference.output_table import TABLE
from medconv.inference.predictor import Predictor
from medconv.utils.atomic_io import write_text

PROBABILITIES = "probabilities"
DICOM_SEG = "dicomseg"
UNCERTAINTY = "uncertainty"
QUALITY = inference_quality.FOLDER
_FOLDERS = {PROBABILITIES: ".nii.gz", DICOM_SEG: ".dcm", UNCERTAINTY: ".nii.gz", QUALITY: ".json"}
_VOLUME, _PICTURE = ".nii.gz", ".png"
_PARTIAL = re.compile(r"\.\d+\..*")  # a temporary file of `atomic_io.replacing`, left by a killed process


class OutputDir(Output):
    """Where label maps go; a case is done once its label map exists. They are PNG files if all images are
    pictures (PNG, JPEG and the like).

    Args: settings, about: as in `Output`. probabilities, dicom_seg, quality: whether they are written, too.
        calibration: as in `quality.calibrated`.
    """

    what = "label maps"
    earlier = "before or by others"

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        about: Mapping[str, Any],
        probabilities: bool = False,
        dicom_seg: bool = False,
        quality: bool = False,
        calibration: Mapping[str, inference_quality.Line | None] | None = None,
    ) -> None:
        lines = {name: list(line) if line else None for name, line in (calibration or {}).items()}
        options = {"dicom_seg": dicom_seg, "quality": quality, "calibration": lines}
        extra = {name: value for name, value in options.items() if value}
        super().__init__(path, {**settings, "probabilities": probabilities, **extra}, about)
        self._writes_probabilities, self._writes_dicom_seg = probabilities, dicom_seg
        self._writes_quality, self._calibration = quality, calibration or {}
        self._ending = _VOLUME  # of label maps; `open` chooses it by the cases

    def label(self, case: str) -> Path:
        return self.path / f"{case}{self._ending}"

    def beside(self, folder: str, case: str) -> Path:
        """A case's file in one of the folders beside the label maps."""
        return self.path / folder / f"{case}{_FOLDERS[folder]}"

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """As in `Output`. Raises: ValueError: it holds the images themselves."""
        images = [path for case in cases for path in case.images]
        self._ending = _PICTURE if all(map(is_picture, images)) else _VOLUME
        self._check_apart(images)
        with super().open(cases, overwrite):
            yield

    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        """Cases that another process works on are tried again at the end, and then skipped."""
        postponed: list[Case] = []
        for is_second_pass, remaining in ((False, cases), (True, postponed)):
            for case in remaining:
                lock = FileLock(self._claims / f"{case.id}.lock", thread_local=False)
                if self._claimed(case, lock):
                    yield case, lock.release
                elif self.label(case.id).exists():
                    self.skipped.append(case.id)
                elif is_second_pass:
                    self.claimed_by_others.append(case.id)
                else:
                    postponed.append(case)

    @torch.inference_mode()
    def write(self, predictor: Predictor, case: Case, scores: LabelMapScores) -> None:
        label, image = predictor.answer(scores), case.images[0]
        if self._writes_probabilities:
            path, count = self.beside(PROBABILITIES, case.id), predictor.targets.num_outputs
            with_cpu_fallback(
                scores, lambda placed: write_channels(path, placed.probabilities(), count, image)
            )
        if self._writes_dicom_seg:
            data_dicom_seg.write(self.beside(DICOM_SEG, case.id), label, image, predictor.class_names)
        if self._writes_quality:
            self._write_quality(case, scores)
        write_label(self.label(case.id), label, image)

    def _write_quality(self, case: Case, scores: LabelMapScores) -> None:
        uncertainty = with_cpu_fallback(scores, LabelMapScores.uncertainty)
        write_channels(self.beside(UNCERTAINTY, case.id), [uncertainty], 1, case.images[0])
        path = self.beside(QUALITY, case.id)
        path.parent.mkdir(exist_ok=True)
        found = inference_quality.calibrated(scores.agreement(), self._calibration)
        write_text(path, json.dumps(found, indent=2) + "\n")

    def _claimed(self, case: Case, lock: FileLock) -> bool:
        """Whether this process now holds the case's lock, and the case is not done."""
        if self.label(case.id).exists() or not acquired(lock):
            return False
        if self.label(case.id).exists():  # written by another process in between
            lock.release()
            return False
        return True

    def _check_apart(self, images: Sequence[Path]) -> None:
        """Raises: ValueError: results would be written into a folder of images. Folders are compared by
        identity, not by path, since links give one folder several paths."""
        folders = (self.path, *(self.path / name for name in _FOLDERS))
        outputs = {*map(_identity, folders)} - {None}
        for path in images:
            if outputs & _folders_of(path):
                raise self._refusal(f"holds the images themselves, such as {path}; take another folder")

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        if (self.path / TABLE).exists():
            raise self._refusal(f"holds {TABLE}; take another folder")
        paths = (path for path in self.path.glob(f"*{self._ending}") if path.name[0] != ".")
        return sorted(path.name.removesuffix(self._ending) for path in paths)

    def _name(self, case: str) -> str:
        return f"{case}{self._ending}"

    def _clean(self, replaced: Sequence[str]) -> None:
        kinds = {"": self._ending, **_FOLDERS}
        for path in [
            path for name, ending in kinds.items() for path in (self.path / name).glob(f".*{ending}")
        ]:
            if _PARTIAL.fullmatch(path.name):
                path.unlink()
        for case in replaced:
            for path in (self.label(case), *(self.beside(name, case) for name in _FOLDERS)):
                path.unlink(missing_ok=True)


def _folders_of(image: Path) -> set[tuple[int, int] | None]:
    """Identities of the folder in the path, of the real folder if the path is a link, and of the path itself,
    which is a folder for a DICOM series.
    """
    image, _ = choice_of(image)
    try:
        return {_identity(image.parent), _identity(Path(os.path.realpath(image)).parent), _identity(image)}
    except ValueError:  # not a possible file name; such a case fails when it is read
        return set()


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode, which are the same for all paths of a folder; None: it does not exist."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
