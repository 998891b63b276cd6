"""The data sets of the zoo benchmark: real ones by their folder, generated ones, and published numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ct_phantom, pictures, radiographs
from medconv.data.case import Case
from medconv.data.splits import split_fold
from medconv.utils.atomic_io import write_text

FOLDS = 5


@dataclass(frozen=True)
class DataSet:
    """A data set and how to train on it.

    Args:
        folder: below the folder of real data; empty for a generated one.
        settings: from the folder of real data and an output folder to overrides of the config.
        published: the best number that others report, with its source.
        published_dice: one of them to draw beside ours: nnU-Net's, where there is one.
        has_label_maps: the labels are label maps; False: classes of whole images.
    """

    name: str
    folder: str
    settings: Callable[[Path, Path], list[str]]
    published: str = ""
    published_dice: float | None = None
    has_label_maps: bool = True

    def is_there(self, root: Path) -> bool:
        return not self.folder or (root / self.folder).exists()


def few_cases(names: Sequence[str], count: int) -> list[dict[str, list[str]]]:
    """Fold 0 of five with its first training cases only, and all of its validation cases."""
    train, val = split_fold([Case(name, ()) for name in sorted(names)], 0, FOLDS)
    return [{"train": [case.id for case in train[:count]], "val": [case.id for case in val]}]


def _case_names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".nii.gz") for path in (folder / "labelsTr").glob("*.nii.gz"))


def _phantom(dims: str) -> Callable[[Path, Path], list[str]]:
    return lambda root, output: [f"data=phantom{dims}", f"data.root={output / f'phantom{dims}'}"]


def _decathlon(folder: str) -> Callable[[Path, Path], list[str]]:
    return lambda root, output: ["data=msd", f"data.root={root / folder}"]


def _acdc(root: Path, output: Path) -> list[str]:
    # Both frames of a patient in one fold
    return ["data=nnunet", f"data.root={root / 'Dataset027_ACDC'}", r"data.group_pattern='patient\d+'"]


def _few_atria(count: int) -> Callable[[Path, Path], list[str]]:
    def settings(root: Path, output: Path) -> list[str]:
        folder = root / "LA2018"
        splits = output / f"la2018-{count}-splits.json"
        write_text(splits, json.dumps(few_cases(_case_names(folder), count)))
        return ["data=msd", f"data.root={folder}", f"data.splits_file={splits}"]

    return settings


def _pictures(root: Path, output: Path) -> list[str]:
    images, masks = pictures.made(output / "pictures")
    return ["data=image_mask", f"data.images={images}", f"data.labels={masks}"]


def _drive(root: Path, output: Path) -> list[str]:
    images, masks = "images/{id}_training.tif", "1st_manual/{id}_manual1.gif"
    return [
        "data=image_mask",
        f"data.root={root / 'DRIVE'}",
        f"data.images='{images}'",
        f"data.labels='{masks}'",
    ]


def _nuclei(root: Path, output: Path) -> list[str]:
    return ["data=image_mask", f"data.root={root / 'DSB2018'}", "data.images=images", "data.labels=masks"]


def _medmnist(name: str) -> Callable[[Path, Path], list[str]]:
    return lambda root, output: ["data=medmnist", f"data.root={root / 'medmnist' / f'{name}.npz'}"]


def _radiographs(root: Path, output: Path) -> list[str]:
    return ["data=imagefolder", f"data.root={radiographs.made(output / 'radiographs/pictures')}"]


def _ct(root: Path, output: Path) -> list[str]:
    return ["data=msd", f"data.root={ct_phantom.made(output / 'ct')}"]


SETS = {
    data.name: data
    for data in (
        DataSet("phantom", "", _phantom("")),
        DataSet("phantom2d", "", _phantom("2d")),
        DataSet("pictures", "", _pictures),
        DataSet(
            "hippocampus",
            "Task04_Hippocampus",
            _decathlon("Task04_Hippocampus"),
            "nnU-Net, 1000 epochs on a GPU: .892 (fold 0), .890 (five folds)",
            0.892,
        ),
        DataSet("acdc", "Dataset027_ACDC", _acdc, "nnU-Net, 100 patients: .913; ResEnc L .925", 0.913),
        DataSet("la2018", "LA2018", _decathlon("LA2018"), "V-Net, 80 cases, GPU: .916", 0.916),
        DataSet("la2018-16", "LA2018", _few_atria(16), "V-Net, 16 cases, GPU: .86", 0.86),
        DataSet("la2018-8", "LA2018", _few_atria(8), "V-Net, 8 cases, GPU: .80", 0.80),
        DataSet("drive", "DRIVE", _drive, "U-Nets, the official 20 test pictures, GPU: .82 to .83", 0.83),
        DataSet("nuclei", "DSB2018", _nuclei, "U-Nets on other splits, GPU: .90 to .91", 0.91),
        DataSet(
            "pneumonia", "medmnist/pneumoniamnist.npz", _medmnist("pneumoniamnist"), has_label_maps=False
        ),
        DataSet("adrenal", "medmnist/adrenalmnist3d.npz", _medmnist("adrenalmnist3d"), has_label_maps=False),
        DataSet("ct", "", _ct),
        DataSet("radiographs", "", _radiographs, has_label_maps=False),
    )
}
