"""Check every file of a dataset, all faults at once, and take its fingerprint on the same pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medconv.data.case import Case, Dataset, Grid
from medconv.data.io.images import check_same_grid, nifti_header, read_image, read_label
from medconv.data.io.raster import pictures
from medconv.data.preprocessing.preprocess import content_box, to_canonical
from medconv.utils.threads import each

_SHEARED = 0.5  # degrees: beyond rounding, a gantry that was tilted
_SAMPLED = 5_000  # foreground voxels per case that stand for its intensities
_FEWEST, _IN_ALL = (
    100,
    20_000_000,
)  # of a whole image, where there are very many cases; and of all of them together
_ODD = {
    True: "one slice only, while most cases are volumes",
    False: "a volume, while most cases are one slice only",
}


@dataclass
class CaseReport:
    """What one case holds, and what is wrong with it.

    Args:
        grid, channels, low, high: as its files have it; lowest and highest intensity of all channels.
        shape, spacing_mm: of the content, in canonical (RAS) axis order.
        class_voxels: one count per class; voxels to ignore are not counted. intensities: (channels, sampled
            voxels).
        content: of a whole image, a hash of its voxels.
    """

    case: str
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    grid: Grid | None = None
    channels: int = 0
    low: float = 0.0
    high: float = 0.0
    shape: tuple[int, ...] = ()
    spacing_mm: tuple[float, ...] = ()
    flat: bool = False
    class_voxels: tuple[int, ...] = ()
    intensities: np.ndarray | None = None
    content: str = ""


@dataclass(frozen=True)
class Fingerprint:
    """What planning needs to know of a dataset; lengths in mm, shapes in voxels, axes
    right-anterior-superior.

    Args:
        shapes, spacings_mm: one per case, of its content.
        intensities: per channel, of the foreground of all cases (of pictures and whole images of all voxels):
            percentile_00_5, percentile_99_5, mean, std.
        class_voxels: per case, one count per class; none of whole images.
        contents: per case, of whole images, a hash of the voxels.
    """

    spatial_dims: int
    shapes: tuple[tuple[int, ...], ...]
    spacings_mm: tuple[tuple[float, ...], ...]
    intensities: tuple[dict[str, float], ...]
    class_voxels: tuple[tuple[int, ...], ...]
    contents: tuple[str, ...] = ()


class Checked(NamedTuple):
    """What a check found. Args: faults: of each case that is left out. warnings: one line each."""

    fingerprint: Fingerprint
    warnings: list[str]
    faults: dict[str, list[str]]


def check(dataset: Dataset, workers: int, skip: bool = False) -> Checked:
    """Read every file once; the fingerprint is of the cases without a fault.

    Args: skip: leave faulty cases out, as long as any is good.
    Raises: ValueError: at least one fault; the message has one line for each, with case, file and
    expectation.
    """
    reports = survey(dataset, workers)
    faults = {r.case: r.faults for r in reports if r.faults}
    good = [r for r in reports if not r.faults]
    if faults and not (skip and good):
        raise ValueError(complaint(dataset, faults))
    return Checked(measured(good), [f"case {r.case}: {w}" for r in good for w in r.warnings], faults)


def survey(dataset: Dataset, workers: int) -> list[CaseReport]:
    """A report of every case, in the dataset's order."""
    reports = list(each(lambda case: examine(case, dataset), dataset.cases, workers, "checking"))
    known = [r for r in reports if r.shape]
    flat = [r for r in known if r.flat]
    mostly_flat = 2 * len(flat) > len(known)
    for report in known:
        report.faults += [_ODD[report.flat]] if report.flat != mostly_flat else []
    return reports


def complaint(dataset: Dataset, faults: Mapping[str, Sequence[str]]) -> str:
    lines = [f"  case {case}: {fault}" for case, found in faults.items() for fault in found]
    return f"dataset {dataset.name}: {len(lines)} faults in {len(dataset.cases)} cases\n" + "\n".join(lines)


def still_faulty(dataset: Dataset, faults: Mapping[str, Sequence[str]]) -> bool:
    """Whether what was wrong with these cases still is; a missing permission, say, may be given without a
    trace.
    """
    known = {case.id: case for case in dataset.cases}
    odd = set(_ODD.values())
    return all(
        case in known and (odd & set(found) or examine(known[case], dataset).faults == list(found))
        for case, found in faults.items()
    )


def examine(case: Case, dataset: Dataset) -> CaseReport:
    """Everything that can be said of one case from its files; never raises for a fault of theirs."""
    report = CaseReport(case.id)
    if case.id in dataset.faults:
        report.faults.append(dataset.faults[case.id])
        return report
    image = _image(case, len(dataset.modalities), report)
    if dataset.image_targets is not None:
        _whole(case, image, dataset, report)
        return report
    label = _label(case, len(dataset.class_names), dataset.targets.ignore, report)
    if image is not None and label is not None:
        try:
            check_same_grid(case.images[0], image[1], case.files[-1], label[1])
        except ValueError as error:
            report.faults.append(str(error))
            return report
        _describe(image[0], image[1], label[0], dataset, report)
    return report


def _whole(case: Case, image: tuple[np.ndarray, Grid] | None, dataset: Dataset, report: CaseReport) -> None:
    """A case that has values and no label map."""
    assert dataset.image_targets is not None
    fault = "has no values" if case.values is None else dataset.image_targets.fault(case.values)
    report.faults += [fault] if fault else []
    if image is None:
        return
    voxels, grid = image
    canonical, report.spacing_mm = to_canonical(voxels, grid)
    report.flat, report.shape = grid.shape[2] == 1, canonical.shape[1:]
    report.content = blake2b(voxels.tobytes(), digest_size=8, key=repr(grid.shape).encode()).hexdigest()
    if case.part != "test":  # which nothing may be learned from
        report.intensities = _every(voxels, max(_FEWEST, min(_SAMPLED, _IN_ALL // len(dataset.cases))))


def _every(image: np.ndarray, most: int) -> np.ndarray:
    """Voxels spread evenly over the image: (channels, X, Y, Z) -> (channels, up to some more than `most`)."""
    flat = image.reshape(len(image), -1)
    return flat[:, :: max(1, flat.shape[1] // most)].copy()


def _image(case: Case, num_channels: int, report: CaseReport) -> tuple[np.ndarray, Grid] | None:
    try:
        image, grid = read_image(case.images)
    except ValueError as error:
        report.faults.append(str(error))
        return None
    path = case.images[0]
    if len(image) != num_channels:
        report.faults.append(
            f"{path}: expected as many channels as are declared, {num_channels}, found {len(image)}"
        )
    if not np.isfinite(image).all():
        report.faults.append(
            f"{path}: {int((~np.isfinite(image)).sum())} voxels are NaN or infinite, expected finite numbers"
        )
    ranges = [(float(channel.min()), float(channel.max())) for channel in image]
    if any(low == high for low, high in ranges):
        report.warnings.append(f"{path}: a channel is constant")
    report.low, report.high = min(low for low, _ in ranges), max(high for _, high in ranges)
    report.grid, report.channels = grid, len(image)
    report.warnings += [w for p in case.images for w in _disagreeing_forms(p)]
    if grid.shear > _SHEARED:
        report.warnings.append(
            f"{path}: its axes are {grid.shear:.1f} degrees off a right angle; it is used as it is"
        )
    return image, grid


def _label(
    case: Case, num_classes: int, ignore: int | None, report: CaseReport
) -> tuple[np.ndarray, Grid] | None:
    if case.label is None:
        report.faults.append("has no label, which training needs")
        return None
    try:
        label, grid = read_label(case.label)
    except ValueError as error:
        report.faults.append(str(error))
        return None
    undeclared = (
        [int(v) for v in np.unique(label) if v >= num_classes and v != ignore]
        if label.max() >= num_classes
        else []
    )
    if undeclared:
        also = "" if ignore is None else f", and {ignore} to be ignored"
        report.faults.append(
            f"{case.label}: label values {undeclared} are not declared, expected 0 to {num_classes - 1}{also}"
        )
    if ignore is not None and (label == ignore).all():
        report.warnings.append(f"{case.label}: nothing is known, every voxel is to be ignored")
    elif not (label.any() if ignore is None else (label[label != ignore]).any()):
        report.warnings.append(f"{case.label}: no foreground, every voxel is background")
    return label, grid


def _disagreeing_forms(path: Path) -> list[str]:
    header = nifti_header(path)
    if header is None:
        return []
    try:
        (sform, s_code), (qform, q_code) = header.get_sform(coded=True), header.get_qform(coded=True)
    except ValueError as error:  # a quaternion that is none
        return [f"{path}: its qform cannot be read ({error}); the sform is used"]
    if not (s_code and q_code):
        return []
    shape = header.get_data_shape()
    distance = Grid.of(shape, sform).corner_distance(Grid.of(shape, qform))
    return (
        [f"{path}: sform and qform differ by {distance:.3g} voxels; the sform is used"]
        if distance > 0.01
        else []
    )


def _describe(image: np.ndarray, grid: Grid, label: np.ndarray, dataset: Dataset, report: CaseReport) -> None:
    report.flat = grid.shape[2] == 1
    canonical, spacing = to_canonical(image, grid)
    box = content_box(canonical)
    report.shape = tuple(s.stop - s.start for s in box)
    report.spacing_mm = spacing
    if pictures(dataset.modalities):
        report.intensities = _every(image, _SAMPLED)
    stored = label.T.reshape(-1)  # as files have it, the first axis fastest
    num_classes, ignore = len(dataset.class_names), dataset.targets.ignore
    known = stored if ignore is None else stored[stored != ignore]
    report.class_voxels = tuple(
        int(n) for n in np.bincount(known.clip(max=num_classes - 1), minlength=num_classes)
    )
    if report.intensities is not None:
        return
    places = np.flatnonzero(stored if ignore is None else (stored > 0) & (stored != ignore))
    places = places if len(places) else np.flatnonzero(stored != (-1 if ignore is None else ignore))
    places = places[:: max(1, len(places) // _SAMPLED)]
    report.intensities = np.stack([channel.T.reshape(-1)[places] for channel in image])


def measured(reports: Sequence[CaseReport]) -> Fingerprint:
    """The fingerprint of cases without faults."""
    spatial_dims = 2 if reports[0].flat else 3
    samples = np.concatenate([r.intensities for r in reports if r.intensities is not None], axis=1)
    if not samples.shape[1]:
        raise ValueError("nothing is known of any case: every voxel of all label maps is to be ignored")
    low, high = np.percentile(samples, [0.5, 99.5], axis=1)
    intensities = [
        {
            "percentile_00_5": float(a),
            "percentile_99_5": float(b),
            "mean": float(c.mean()),
            "std": float(c.std()),
        }
        for a, b, c in zip(low, high, samples, strict=True)
    ]
    return Fingerprint(
        spatial_dims,
        tuple(r.shape[:spatial_dims] for r in reports),
        tuple(r.spacing_mm[:spatial_dims] for r in reports),
        tuple(intensities),
        tuple(r.class_voxels for r in reports),
        tuple(r.content for r in reports) if any(r.content for r in reports) else (),
    )
