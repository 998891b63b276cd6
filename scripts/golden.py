"""Golden runs: small deterministic runs of the command line, and digests of all that they write.

A refactoring that must not change results is checked with them, on one machine:

    git worktree add ../before HEAD                       # the tree before the refactoring
    python scripts/golden.py record before.json --checkout ../before
    ...                                                   # refactor
    python scripts/golden.py record after.json            # minutes; --only cv regions: only these
    python scripts/golden.py compare before.json after.json

`compare` prints each run and artefact that differs, and exits with 1 if there are any; a recording with
`--only` is compared in these runs alone. To see what differs, record both with `--keep FOLDER` and compare
the files. Digests depend on the processor and on the versions of torch and NumPy, so recordings are not
committed, and `compare` refuses those of different machines. Both must be made by the same version of this
script, and by trees that read the same command lines: after a change that renames a key on purpose, record
anew.

Only `medconv` commands are run, in processes of their own, and files are read by their own libraries: nothing
here imports medconv, so that modules may move. Digests are of content: arrays, not containers; without paths,
times, versions, and of each `_target_` only the last part.

| artefact | content |
|---|---|
| `NAME/config`, `NAME/plan` | config.yaml of a run; its `derived` values, patch and batch |
| `NAME/store`, `NAME/fingerprint` | arrays of the prepared cases; statistics of the data |
| `NAME/metrics`, `NAME/summary` | metrics.csv and summary.json without times and rates |
| `NAME/last`, `NAME/best` | names, types, shapes and values of the tensors in `state_dict` |
| `NAME/parameters` | their names alone, in order |
| `NAME/events` | scalars and pictures of TensorBoard |
| `FOLDER/...` | label maps with affine, tables and JSON files of predictions and evaluations |

The real images are those of the tests: the folder that MEDCONV_REALDATA names, else `../shared/data` beside
the checkout. Runs that need them are skipped where it is absent.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
import yaml
from PIL import Image

CHECKOUT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "numpy", "scipy", "monai", "lightning", "nibabel", "pillow", "matplotlib")
# Keys and columns of files that hold times, rates, memory, versions, paths, or hashes of files and of configs
# that hold these; `sources` and `stamps` say when an image was written, `key` is of a config
VARYING = re.compile(
    r"perf/.*|(wall_seconds|fit_seconds|samples_per_second|data_wait_share|step_shares|verdict|conv_price|peak_memory_bytes)|"
    r"(versions|hardware|git_commit|command)|(checkpoint|checkpoints|stamps|sources|key|sha256)|percentiles"
)
# Nothing may depend on measured time or memory, or on the number of cores
COMMON = (
    "trainer.accelerator=cpu",
    "trainer.deterministic=true",
    "trainer.max_time=null",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
    "plan.size=tiny",
    "plan.memory_gb=1",
    "data.num_workers=0",
)
FP32 = "trainer.precision=32-true"  # the other runs take bf16 if the processor is fast at it
# A U-Net of two stages, for images of some 16 voxels along each axis
TWO_STAGES = ("plan.channels=[4,8]", "plan.strides=[[2,2,2]]", "plan.kernel_sizes=[[3,3,3],[3,3,3]]")
SMALL = (FP32, "trainer.max_steps=6", "data.batch_size=2", "data.samples_per_epoch=6", "data.num_folds=3")
STOPPED = 75  # exit code of a run that was told to stop by a signal


class Absent(Exception):
    """The real images of a run are not on this machine."""


class Failed(Exception):
    """A command ended with another exit code than expected."""


@dataclass
class Recorder:
    """One golden run: the folder where its commands work, and the digests so far.

    `names` has words for texts that differ between two equal runs: paths, and names of folders that are
    hashes of a config with paths.
    """

    folder: Path
    checkout: Path
    artefacts: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names |= {str(self.folder): "FOLDER", str(self.checkout): "CHECKOUT"}

    # Commands

    def medconv(self, *words: object, exit_code: int = 0, **environment: str) -> str:
        """Run `medconv WORDS` in the folder. Returns: what it printed on stdout. Raises: Failed."""
        done = subprocess.run(
            [sys.executable, "-m", "medconv.cli", *map(str, words)],
            cwd=self.folder,
            env={**_environment(self.checkout, self.folder), **environment},
            text=True,
            capture_output=True,
            check=False,
        )
        with (self.folder / "commands.log").open("a") as log:
            log.write(f"$ medconv {' '.join(map(str, words))}\n{done.stdout}{done.stderr}\n")
        if done.returncode != exit_code:
            end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise Failed(f"medconv {' '.join(map(str, words))}: exit code {done.returncode}\n{end}")
        return done.stdout

    def train(self, name: str, *overrides: str, options: Sequence[str] = ()) -> Path:
        """Train runs/NAME and digest it. Returns: its best checkpoint."""
        self.medconv("train", *options, *COMMON, *overrides, f"run.name={name}")
        self.add_run(name, self.folder / "runs" / name)
        self.add_store(name)
        return self.folder / "runs" / name / "checkpoints/best.ckpt"

    def predict(self, name: str, checkpoints: Sequence[Path], images: object, *options: object) -> Path:
        """Predict into NAME and digest what was written."""
        where = ("--input", images, "--output", name, "--device", "cpu")
        self.medconv("predict", "--checkpoint", *checkpoints, *where, *options)
        self.add_folder(name)
        return self.folder / name

    def evaluate(self, name: str, predictions: Path, *options: object) -> None:
        """Evaluate into NAME/metrics.json and digest it with its table."""
        (self.folder / name).mkdir()
        self.medconv("evaluate", "--predictions", predictions, "--output", f"{name}/metrics.json", *options)
        self.add_folder(name)

    # Digests

    def add(self, name: str, content: Any) -> None:
        """Digest plain values, without what differs between two equal runs."""
        text = json.dumps(self.cleaned(content), sort_keys=True)
        self.artefacts[name] = hashlib.sha256(text.encode()).hexdigest()

    def cleaned(self, value: Any) -> Any:
        """Plain values without times and paths, and classes without their modules."""
        if isinstance(value, dict):
            kept = {str(key): item for key, item in value.items() if not VARYING.fullmatch(str(key))}
            if kept.get("_target_"):
                kept["_target_"] = kept["_target_"].rpartition(".")[2]
            return {self.cleaned(key): self.cleaned(item) for key, item in kept.items()}
        if isinstance(value, (list, tuple)):
            return [self.cleaned(item) for item in value]
        if isinstance(value, str):
            for text, word in self.names.items():
                value = value.replace(text, word)
        return value

    def add_run(self, name: str, run: Path) -> None:
        config = yaml.safe_load((run / "config.yaml").read_text())
        data = config["data"]
        self.add(f"{name}/config", config)
        self.add(f"{name}/plan", [config["derived"], data["patch_size"], data["batch_size"], config["plan"]])
        self.add(f"{name}/metrics", _logged(run / "metrics.csv"))
        self.add(f"{name}/summary", json.loads((run / "summary.json").read_text()))
        self.add(f"{name}/events", _events(run / "tensorboard"))
        for which in ("last", "best"):
            content = torch.load(run / f"checkpoints/{which}.ckpt", map_location="cpu", weights_only=True)
            tensors = content["state_dict"]
            self.add(f"{name}/{which}", tensor_digests(tensors))
            if which == "last":
                self.add(f"{name}/parameters", list(tensors))

    def add_store(self, name: str) -> None:
        """Digest the prepared cases; the folders' names are hashes of paths, so they are left out."""
        prepared = self.folder / "data/prepared"
        arrays = [[path.name, array_digest(np.load(path))] for path in prepared.rglob("*.npy")]
        self.add(f"{name}/store", sorted(arrays))
        prints = [self.cleaned(json.loads(path.read_text())) for path in prepared.rglob("fingerprint.json")]
        self.add(f"{name}/fingerprint", sorted(prints, key=json.dumps))

    def add_folder(self, name: str) -> None:
        """Digest all images, tables and JSON files in a folder."""
        for path in sorted((self.folder / name).rglob("*")):
            if (content := _file_content(path)) is not None:
                self.add(str(path.relative_to(self.folder)), content)

    def same(self, name: str, one: str, other: str) -> None:
        """Require that two artefacts are equal. Raises: Failed."""
        if self.artefacts[one] != self.artefacts[other]:
            raise Failed(f"{name}: {one} and {other} differ")

    # Data

    def real(self, dataset: str, cases: Sequence[str]) -> Path:
        """A dataset of links to some cases of a real one. Raises: Absent."""
        source = _real_data(CHECKOUT) / dataset
        if not source.is_dir():
            raise Absent(f"no {source}; MEDCONV_REALDATA may name the folder of real images")
        root = self.folder / dataset
        for part in ("imagesTr", "labelsTr"):
            (root / part).mkdir(parents=True)
            for path in sorted((source / part).iterdir()):
                if path.name.startswith(tuple(cases)):
                    (root / part / path.name).symlink_to(path)
        meta = json.loads((source / "dataset.json").read_text())
        if "training" in meta:
            rows = meta["training"]
            meta["training"] = [row for row in rows if Path(row["label"]).name.startswith(tuple(cases))]
        meta["numTraining"] = len(list((root / "labelsTr").iterdir()))
        (root / "dataset.json").write_text(json.dumps(meta))
        return root


def _environment(checkout: Path, folder: Path) -> dict[str, str]:
    """The checkout's package, one thread, and nothing of a cluster; FOLDER holds modules of the user."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "MEDCONV_", "PYTEST_", "OMPI_", "TORCHELASTIC_", "CUDA_"))
        and name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "PYTHONHASHSEED")
    }
    path = os.pathsep.join((str(checkout), str(folder)))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}


def _real_data(checkout: Path) -> Path:
    return Path(os.environ.get("MEDCONV_REALDATA") or checkout.parent / "shared/data")


def tensor_digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Of each, by its name; of bfloat16, which NumPy lacks, the bits."""
    arrays = {
        name: (tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in tensors.items()
    }
    return {name: array_digest(array) for name, array in arrays.items()}


def array_digest(array: np.ndarray) -> str:
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def _rows(table: Path) -> list[dict[str, str]]:
    """Rows of a CSV table without empty cells."""
    with table.open(newline="") as file:
        return [{key: text for key, text in row.items() if text} for row in csv.DictReader(file)]


def _logged(table: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv in which more was logged than times."""
    rows = [{key: text for key, text in row.items() if not VARYING.fullmatch(key)} for row in _rows(table)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def _events(folder: Path) -> dict[str, Any]:
    """Steps and values of each scalar, and pixels of each picture."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    read.Reload()
    scalars = [tag for tag in read.Tags()["scalars"] if not VARYING.fullmatch(tag)]
    found: dict[str, Any] = {tag: [[e.step, e.value] for e in read.Scalars(tag)] for tag in scalars}
    for tag in read.Tags()["images"]:
        shown = read.Images(tag)
        found[tag] = [[e.step, hashlib.sha256(e.encoded_image_string).hexdigest()] for e in shown]
    return found


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels and affine of a NIfTI file."""
    image: Any = nib.load(path)
    return np.asarray(image.dataobj), image.affine


def _file_content(path: Path) -> Any:
    """What a file holds as plain values; None: not digested."""
    if path.name.startswith("."):
        return None
    if path.name.endswith((".nii", ".nii.gz")):
        voxels, affine = _read(path)
        return [array_digest(voxels), affine.tolist()]
    if path.suffix == ".png":
        return array_digest(np.asarray(Image.open(path)))
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".html":
        return path.read_text()
    if path.suffix == ".csv":
        return _rows(path)
    return None


# Generated data


def write_volumes(root: Path, cases: int = 6, channels: int = 1, ignore: int = 0) -> Path:
    """nnU-Net's layout: in noise a bright box, and but for the last case a dark one.

    Args:
        ignore: a value for the first two planes of each label map.
    """
    (root / "imagesTr").mkdir(parents=True)
    (root / "labelsTr").mkdir()
    for case in range(cases):
        rng = np.random.default_rng([cases, case])
        label = np.zeros((16, 18, 12), np.uint8)
        label[2:8, 3 + case % 3 : 9 + case % 3, 1:7] = 1
        if case < cases - 1:
            label[10:14, 10:15, 2:9] = 2
        affine = np.diag([1.0 if case % 2 else -1.0, 1.5, 2.0, 1.0])
        for channel in range(channels):
            values = np.array([1.0, 3.0, 0.2])[label] * (-1) ** channel
            image = (rng.normal(0, 0.2, label.shape) + values).astype(np.float32)
            _save(image, affine, root / f"imagesTr/case_{case}_{channel:04d}.nii.gz")
        if ignore:
            label[:2] = ignore
        _save(label, affine, root / f"labelsTr/case_{case}.nii.gz")
    labels = {"background": 0, "box": 1, "hole": 2, **({"ignore": ignore} if ignore else {})}
    names = {str(channel): f"MRI{channel}" for channel in range(channels)}
    meta = {"channel_names": names, "labels": labels, "numTraining": cases, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(meta))
    return root


def _save(array: np.ndarray, affine: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, affine), path)


def write_pictures(root: Path, cases: int = 8) -> Path:
    """Colour pictures with a line and a disk, and masks of both."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    rows, columns = np.mgrid[:40, :48]
    for case in range(cases):
        rng = np.random.default_rng(case)
        mask = np.zeros((40, 48), np.uint8)
        mask[np.abs(rows - columns + rng.integers(-8, 8)) < 3] = 1
        mask[(rows - rng.integers(10, 30)) ** 2 + (columns - rng.integers(10, 38)) ** 2 < 36] = 2
        colours = np.array([[60, 90, 50], [180, 60, 70], [90, 100, 200]])[mask]
        pixels = (colours + rng.normal(0, 20, colours.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"images/p{case}.png")
        Image.fromarray(mask).save(root / f"masks/p{case}.png")
    return root


def write_table(root: Path, cases: int = 18) -> Path:
    """Grey pictures and labels.csv: brightness as a class, a number, and two findings."""
    root.mkdir(parents=True)
    with (root / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "split", "grade", "number", "bright", "striped"])
        for case in range(cases):
            grade = case % 3
            striped = case // 3 % 2
            pixels = np.random.default_rng(case).normal(50 + 60 * grade, 15, (16, 16))
            pixels[::2] += 40 * striped
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"{case}.png")
            split = ("train", "train", "train", "val", "val", "test")[case // 3]
            numbers = (1000.5 + 100 * grade, int(grade > 1), striped)
            writer.writerow([f"{case}.png", split, f"g{grade}", *numbers])
    return root / "labels.csv"


def write_series(folder: Path, volume: np.ndarray) -> Path:
    """A DICOM series, a file a slice, in another order than their positions."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage

    folder.mkdir(parents=True)
    root = "1.2.826.0.1.3680043.8.498"
    for z in range(volume.shape[2]):
        meta: Any = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = MRImageStorage, ExplicitVRLittleEndian
        meta.MediaStorageSOPInstanceUID = f"{root}.4.{z + 1}"
        slice_ = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
        elements: dict[str, Any] = {
            "SOPClassUID": MRImageStorage,
            "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
            "PatientID": "P1",
            "PatientName": "Test^Person",
            "PatientBirthDate": "19700101",
            "PatientSex": "O",
            "StudyInstanceUID": f"{root}.1",
            "StudyID": "1",
            "StudyDate": "20240101",
            "StudyTime": "120000",
            "AccessionNumber": "1",
            "ReferringPhysicianName": "",
            "SeriesInstanceUID": f"{root}.2",
            "SeriesNumber": 3,
            "FrameOfReferenceUID": f"{root}.3",
            "PositionReferenceIndicator": "",
            "Manufacturer": "Maker",
            "Modality": "MR",
            "ImageType": ["ORIGINAL", "PRIMARY"],
            "InstanceNumber": 7 * z % volume.shape[2] + 1,
            "ImagePositionPatient": [-20.0, 30.5, -7.25 + 2 * z],
            "ImageOrientationPatient": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0],
            "PixelSpacing": [1.5, 1.0],
            "SliceThickness": 2.0,
            "RescaleSlope": 0.01,
            "RescaleIntercept": -1,
            "Rows": volume.shape[1],
            "Columns": volume.shape[0],
            "SamplesPerPixel": 1,
            "PhotometricInterpretation": "MONOCHROME2",
            "BitsAllocated": 16,
            "BitsStored": 16,
            "HighBit": 15,
            "PixelRepresentation": 1,
            "PixelData": np.ascontiguousarray(volume[:, :, z].T).tobytes(),
        }
        for name, value in elements.items():
            setattr(slice_, name, value)
        slice_["PixelData"].VR = "OW"
        slice_.save_as(folder / f"IM{99 - z:03d}.dcm", enforce_file_format=True)
    return folder


# A callback of the user: SIGTERM before a step, as from a cluster that takes its machine back
STOP = """
import os
import signal

from lightning import Callback


class Stop(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == int(os.environ.get("GOLDEN_STOP_AT", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
"""

# The runs; each is the name of an entry of a recording, and its docstring says what it covers


def preprocess(run: Recorder) -> None:
    """Check and preparation alone, on a given grid."""
    data = ("data=nnunet", f"data.root={write_volumes(run.folder / 'boxes')}", "data.spacing_mm=[1.3,1.3,2]")
    run.medconv("preprocess", *COMMON, *data)
    run.add_store("boxes")


def commands(run: Recorder) -> None:
    """The composed config, and the JSON schema."""
    run.add("job", yaml.safe_load(run.medconv("train", "--cfg", "job", "data=msd", "data.root=here")))
    run.add("schema", json.loads(run.medconv("schema")))


def phantom3d(run: Recorder) -> None:
    """The defaults of a 3D run: loaders in processes, growing patches, bf16; prediction and evaluation."""
    best = run.train(
        "phantom3d", "data=phantom", "data.layout.num_cases=8", "data.num_workers=1",
        "data.samples_per_epoch=8", "trainer.max_steps=8", "weight_averaging.begin=2",
        "weight_averaging.every=1",
    )  # fmt: skip
    images = run.folder / "data/phantom/imagesTr"
    predicted = run.predict("predicted", [best], images / "phantom_000.nii.gz", "--overlap", 0.25)
    run.evaluate("evaluated", predicted, "--references", images.parent / "labelsTr")


def phantom2d(run: Recorder) -> None:
    """The defaults of a 2D run, and its test-time augmentation."""
    best = run.train(
        "phantom2d", "data=phantom2d", "data.layout.num_cases=12", "data.samples_per_epoch=12",
        "trainer.max_steps=8", "augmentation.mirror_axes=[0,1]", "task.mirror_axes=all",
    )  # fmt: skip
    run.predict("predicted", [best], "data/phantom2d/imagesTr", "--quality")


def hippocampus(run: Recorder) -> None:
    """Decathlon layout, strong augmentation; probabilities, an ensemble, all of `evaluate`."""
    root = run.real("Task04_Hippocampus", [f"hippocampus_{n:03d}" for n in (1, 3, 4, 6, 7, 8)])
    data = ("data=msd", f"data.root={root}", "augmentation=strong", *SMALL)
    ours = run.train("ours", *data, "optimizer=adamw", "scheduler=one_cycle", "sampler=balanced")
    other = run.train("other", *data, "conv=basis", "loss=tversky", "data.fold=1")
    predicted = run.predict("predicted", [ours], root / "imagesTr", "--save-probabilities")
    image = root / "imagesTr/hippocampus_001.nii.gz"
    both = run.predict("both", [ours, other], image, "--save-probabilities")
    references = ("--references", root / "labelsTr")
    run.evaluate("evaluated", predicted, *references, "--tolerance-mm", 2, "--lesions", 0.1, "--centreline")
    run.evaluate("compared", predicted, "--compare", both, *references)


def acdc(run: Recorder) -> None:
    """nnU-Net's layout and recipe, thick slices, patients that stay in one fold."""
    root = run.real("Dataset027_ACDC", ["patient001", "patient002", "patient003"])
    best = run.train(
        "nnunet", "experiment=nnunet", "data=nnunet", f"data.root={root}",
        "data.group_pattern='(patient\\d+)'", "data.num_folds=3", "data.spacing_mm=[4,4,10]",
        "data.patch_size=[32,32,8]", "trainer.max_epochs=2", "trainer.limit_train_batches=2",
        "trainer.check_val_every_n_epoch=1", "task.mirror_axes=[0]", FP32,
    )  # fmt: skip
    run.predict("predicted", [best], root / "imagesTr/patient001_frame01_0000.nii.gz", "--mirror-axes")


def atrium(run: Recorder) -> None:
    """A planned grid that is coarser than the images."""
    root = run.real("LA2018", ["la_000", "la_001", "la_002"])
    best = run.train("atrium", "data=msd", f"data.root={root}", *SMALL, "conv=none", "loss=boundary")
    run.predict("predicted", [best], root / "imagesTr/la_000.nii.gz")


def slices(run: Recorder) -> None:
    """A 2D network on slices of volumes, in 2D and with another network."""
    root = write_volumes(run.folder / "boxes")
    data = ("data=nnunet", f"data.root={root}", "data.spatial_dims=2", *SMALL)
    best = run.train("slices", *data, "model=monai_unet", "optimizer=sgd", "scheduler=poly", "perf=reference")
    run.predict("predicted", [best], root / "imagesTr")


def regions(run: Recorder) -> None:
    """Overlapping regions, ignored voxels, deep supervision."""
    root = write_volumes(run.folder / "boxes", ignore=3)
    best = run.train(
        "regions", "data=nnunet", f"data.root={root}", *SMALL, *TWO_STAGES,
        "data.regions={both:[box,hole],hole:[hole]}", "data.regions_order=[1,2]",
    )  # fmt: skip
    predicted = run.predict("predicted", [best], root / "imagesTr", "--save-probabilities")
    run.evaluate("evaluated", predicted, "--references", root / "labelsTr")


def raters(run: Recorder) -> None:
    """Label maps of two raters, of which the second lacks a case, and a consensus in the evaluation."""
    root = write_volumes(run.folder / "boxes")
    for path in sorted((root / "labelsTr").iterdir())[:5]:
        voxels, affine = _read(path)
        _save(np.roll(voxels, 1, 0), affine, root / "labelsTr2" / path.name)
    data = ("data=nnunet", f"data.root={root}", "data.raters=[labelsTr2]")
    best = run.train("raters", *data, *SMALL, *TWO_STAGES)
    predicted = run.predict("predicted", [best], root / "imagesTr", "--save-probabilities")
    references = ("--references", root / "labelsTr", "--raters", root / "labelsTr2")
    run.evaluate("majority", predicted, *references)
    run.evaluate("staple", predicted, *references, "--consensus", "staple")


def missing(run: Recorder) -> None:
    """Cases that lack a channel, or labels of a class; drawn by weights."""
    root = write_volumes(run.folder / "boxes", channels=2)
    for case in (1, 4):
        (root / f"imagesTr/case_{case}_0001.nii.gz").unlink()
    best = run.train(
        "missing", "data=nnunet", f"data.root={root}", *SMALL, *TWO_STAGES, "data.missing=allow",
        "data.annotated={case_0:[box],case_1:[box]}", "data.case_weights={case_2:3}", "loss=dice_ce",
        "loss.class_weights={hole:2}", "data.normalisation=dataset",
    )  # fmt: skip
    run.predict("predicted", [best], root / "imagesTr")


def joined(run: Recorder) -> None:
    """Two datasets with other classes, joined by an option of the user's own."""
    for name, count in (("a", 4), ("b", 5)):
        write_volumes(run.folder / name, cases=count)
    option = run.folder / "mine/data/both.yaml"
    option.parent.mkdir(parents=True)
    entries = "a: {layout: nnunet, root: a}\n  b: {layout: nnunet, root: b, rename: {hole: other}}"
    option.write_text(f"defaults: [joined]\nentries:\n  {entries}\n")
    run.train("joined", "data=both", *SMALL, *TWO_STAGES, options=("--config-dir", "mine"))


def classification(run: Recorder) -> None:
    """Classes of pictures, mixup, and an encoder of another library; saliency."""
    table = write_table(run.folder / "table")
    data = ("data=csv", f"data.root={table}", *SMALL, "data.samples_per_epoch=12", "data.batch_size=4")
    best = run.train("ours", *data, "data.label_columns=grade", "task.mixup=0.2")
    predicted = run.predict("predicted", [best], table.parent, "--saliency")
    labels = ("--labels", table, "--label-columns", "grade", "--split", "test")
    run.evaluate("evaluated", predicted / "predictions.csv", *labels)
    run.train("findings", *data, "data.label_columns=[bright,striped]", "model=resnet", "test=true")


def regression(run: Recorder) -> None:
    """Numbers of pictures, and ordered grades."""
    table = write_table(run.folder / "table")
    data = ("data=csv", f"data.root={table}", *SMALL, "data.samples_per_epoch=12", "data.batch_size=4")
    best = run.train("number", *data, "data.label_columns=number")
    predicted = run.predict("predicted", [best], table.parent)
    labels = ("--labels", table, "--label-columns", "number")
    run.evaluate("evaluated", predicted / "predictions.csv", *labels)
    run.train("ordinal", *data, "data.label_columns=grade", "data.target_type=ordinal")


def resumed(run: Recorder) -> None:
    """A run that is stopped by SIGTERM after half of its steps, and resumed, equals one that is not."""
    root = write_volumes(run.folder / "boxes")
    (run.folder / "golden_stop.py").write_text(STOP)
    settings = (
        "data=nnunet", f"data.root={root}", *SMALL, *TWO_STAGES, "trainer.max_steps=12",
        "weight_averaging.begin=4", "weight_averaging.every=2", "+callbacks.stop._target_=golden_stop.Stop",
    )  # fmt: skip
    run.train("whole", *settings)
    words = ("train", *COMMON, *settings, "run.name=stopped")
    run.medconv(*words, exit_code=STOPPED, GOLDEN_STOP_AT="6")
    run.medconv(*words)
    run.add_run("stopped", run.folder / "runs/stopped")
    for artefact in ("metrics", "last", "best", "plan"):
        run.same("resumed", f"whole/{artefact}", f"stopped/{artefact}")


def nnunet(run: Recorder) -> None:
    """A network as a model of nnU-Net: written, imported, and trained further."""
    root = write_volumes(run.folder / "boxes")
    data = ("data=nnunet", f"data.root={root}", *SMALL)
    best = run.train("ours", *data, *TWO_STAGES, "model.strided=true", "model.norm=instance")
    run.medconv("export", "--checkpoint", best, "--format", "nnunet", "--output", "Dataset001_Boxes")
    run.add_folder("Dataset001_Boxes")
    (model,) = (run.folder / "Dataset001_Boxes").iterdir()
    weights = torch.load(model / "fold_0/checkpoint_final.pth", weights_only=True)["network_weights"]
    run.add("Dataset001_Boxes/weights", tensor_digests(weights))
    run.medconv("import-nnunet", model, "--output", "imported")
    imported = run.folder / "imported/fold0/checkpoints/best.ckpt"
    run.predict("predicted", [imported], root / "imagesTr")
    run.train("tuned", *data, f"init.pretrained={model}", "init.freeze=['encoder']", "init.thaw_at=0.5")


def cv(run: Recorder) -> None:
    """Two folds, post-processing found on them, and prediction with it by both networks."""
    root = write_volumes(run.folder / "boxes")
    data = ("data=nnunet", f"data.root={root}", *SMALL, *TWO_STAGES, "data.num_folds=2")
    longer = ("trainer.max_steps=20", "optimizer.lr=0.05")
    run.medconv("train", "-m", *COMMON, *data, *longer, "data.fold=0,1", "run.name=cv")
    configs = list((run.folder / "runs/cv").glob("*/config.yaml"))
    folds = {_config(path)["data"]["fold"]: path.parent for path in configs}
    for fold, folder in folds.items():
        run.names[folder.name] = f"fold{fold}"
        run.add_run(f"fold{fold}", folder)
    run.medconv("find-postprocessing", "--runs", "runs/cv", "--device", "cpu")
    for name in ("cross_validation.json", "folds.csv", "postprocessing.json"):
        run.add(f"cv/{name}", _file_content(run.folder / "runs/cv" / name))
    found = _file_content(run.folder / "runs/cv/postprocessing.json")
    steps = [{"operation": "keep_largest", "label": "*"}, {"operation": "fill_holes", "label": "box"}]
    chosen = run.folder / "chosen.json"  # since no step passes the test with so few cases
    chosen.write_text(json.dumps({**found, "steps": steps, "folds": {}}))
    best = [folds[fold] / "checkpoints/best.ckpt" for fold in sorted(folds)]
    run.predict("predicted", best, root / "imagesTr", "--postprocess", chosen)


def sweep(run: Recorder) -> None:
    """Two convolutions, side by side, with another loss than the default."""
    root = write_pictures(run.folder / "pictures")
    data = ("data=image_mask", f"data.root={root}", "data.images=images/", "data.labels=masks/", *SMALL)
    jobs = ("conv=transform,mirror", "loss=cldice", "seed=3", "run.name=sweep")
    run.medconv("train", "-m", *COMMON, *data, *jobs)
    for path in (run.folder / "runs/sweep").glob("*/config.yaml"):
        conv = _config(path)["conv"]["_target_"].rpartition(".")[2]
        run.names[path.parent.name] = conv
        run.add_run(conv, path.parent)
    run.add("sweep.csv", _rows(run.folder / "runs/sweep/sweep.csv"))


def pictures(run: Recorder) -> None:
    """Colour pictures with masks, light augmentation, pictures as label maps."""
    root = write_pictures(run.folder / "pictures")
    data = ("data=image_mask", f"data.root={root}", "data.images=images/", "data.labels=masks/", *SMALL)
    best = run.train("pictures", *data, "augmentation=monai", "model=resenc", "conv=separable")
    predicted = run.predict("predicted", [best], root / "images", "--save-probabilities")
    run.evaluate("evaluated", predicted, "--references", root / "masks")


def dicom(run: Recorder) -> None:
    """A DICOM series is predicted by a network that was trained on any files; exported networks."""
    root = write_volumes(run.folder / "boxes")
    patterns = ("data.images=imagesTr/{id}_0000.nii.gz", "data.labels=labelsTr/{id}.nii.gz")
    best = run.train("any", "data=folder", f"data.root={root}", *patterns, *SMALL, *TWO_STAGES, "conv=ball")
    image, _ = _read(root / "imagesTr/case_0_0000.nii.gz")
    write_series(run.folder / "scans/p1", np.rint((image + 1) * 100).astype(np.int16))
    run.predict("predicted", [best], "scans")
    run.medconv("export", "--checkpoint", best, "--format", "torchscript", "--output", "exported/model.pt")
    run.add_folder("exported")


RUNS: tuple[Callable[[Recorder], None], ...] = (
    cv,
    nnunet,
    resumed,
    hippocampus,
    acdc,
    atrium,
    phantom3d,
    phantom2d,
    classification,
    regression,
    raters,
    regions,
    missing,
    joined,
    slices,
    pictures,
    sweep,
    dicom,
    commands,
    preprocess,
)  # the longest ones first, so that all processes are busy to the end
RUN_NAMES = tuple(run.__name__ for run in RUNS)


def _config(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# Commands of this script


def machine() -> dict[str, str]:
    """What digests depend on, beside the code."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    processor = f"{models[0] if models else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"processor": processor, "python": platform.python_version(), **versions}


def commit(checkout: Path) -> str:
    """Its hash, with `+` if files were changed since."""
    git = ["git", "-C", str(checkout)]
    words = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    head, changed = (
        subprocess.run([*git, *each], text=True, capture_output=True, check=False).stdout for each in words
    )
    return head.strip() + ("+" if changed else "")


def record(options: argparse.Namespace) -> int:
    checkout = options.checkout.resolve()
    _check_import(checkout)
    chosen = [run for run in RUNS if not options.only or run.__name__ in options.only]
    content: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(checkout),
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "only": options.only,
        "runs": {},
    }
    with _folder(options.keep) as folder, ThreadPoolExecutor(options.jobs) as pool:
        started = {pool.submit(_recorded, run, folder, checkout): run.__name__ for run in chosen}
        for done in as_completed(started):
            content["runs"][started[done]] = done.result()
            options.file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return int(any("failed" in entry for entry in content["runs"].values()))


def _recorded(make: Callable[[Recorder], None], folder: Path, checkout: Path) -> dict[str, Any]:
    """The entry of a run: its artefacts, or why there are none."""
    name, start = make.__name__, time.monotonic()
    recorder = Recorder(folder / name, checkout)
    recorder.folder.mkdir()
    entry: dict[str, Any] = {"artefacts": recorder.artefacts}
    try:
        make(recorder)
        result = f"{len(recorder.artefacts)} artefacts"
    except Absent as reason:
        entry = {"skipped": str(reason)}
        result = f"skipped: {reason}"
    except Exception as error:  # a run that a refactoring broke must not hide the others
        entry = {"failed": f"{type(error).__name__}: {error}"}
        result = f"failed: {error}"
    print(f"{name:16} {time.monotonic() - start:5.1f} s  {result}", flush=True)
    return entry


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where the runs work."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    path = Path(tempfile.mkdtemp(prefix="golden-")).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _check_import(checkout: Path) -> None:
    """Raises: SystemExit: commands would run another package than that of the checkout."""
    words = [sys.executable, "-c", "import medconv; print(medconv.__file__)"]
    environment = _environment(checkout, checkout)
    with tempfile.TemporaryDirectory() as cwd:
        done = subprocess.run(words, cwd=cwd, env=environment, text=True, capture_output=True, check=True)
    imported = Path(done.stdout.strip()).resolve()
    if not imported.is_relative_to(checkout):
        raise SystemExit(f"medconv is imported from {imported}, not from {checkout}")


def compare(options: argparse.Namespace) -> int:
    """Print differences; runs that only one recording has, too, unless the other was of chosen ones."""
    one, other = (json.loads(path.read_text()) for path in (options.one, options.other))
    if one["machine"] != other["machine"]:
        pairs = {key: (value, other["machine"].get(key)) for key, value in one["machine"].items()}
        values = "; ".join(f"{key}: {a}, {b}" for key, (a, b) in pairs.items() if a != b)
        raise SystemExit(f"recorded on different machines or versions, whose results may differ: {values}")
    if one["script"] != other["script"]:
        print("warning: recorded by different versions of this script", file=sys.stderr)
    runs, others = _chosen(one["runs"], other["only"]), _chosen(other["runs"], one["only"])
    if lines := differences(runs, others):
        print("\n".join(lines))
        return 1
    skipped = [name for name, entry in runs.items() if "skipped" in entry]
    count = sum(len(entry.get("artefacts", ())) for entry in runs.values())
    ending = f"; skipped in both: {', '.join(skipped)}" if skipped else ""
    print(f"equal: {len(runs) - len(skipped)} of {len(RUNS)} runs, {count} artefacts{ending}")
    return 0


def _chosen(runs: dict[str, Any], only: list[str] | None) -> dict[str, Any]:
    return runs if only is None else {name: entry for name, entry in runs.items() if name in only}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """A line for each run or artefact that two recordings do not share."""
    lines = []
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            lines.append(f"{name}: only in the {'first' if name in one else 'second'} recording")
            continue
        states = [next(iter(entry)) for entry in (one[name], other[name])]
        if states == ["skipped", "skipped"]:
            continue
        if states != ["artefacts", "artefacts"]:
            lines.append(f"{name}: {states[0]} in the first recording, {states[1]} in the second")
            continue
        first, second = one[name]["artefacts"], other[name]["artefacts"]
        for artefact in sorted({*first, *second}):
            if artefact not in first or artefact not in second:
                lines.append(f"{name}: {artefact}, only in the {'first' if artefact in first else 'second'}")
            elif first[artefact] != second[artefact]:
                lines.append(f"{name}: {artefact}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        "golden.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    recording = actions.add_parser("record", help="run all and write their digests")
    recording.add_argument("file", type=Path, help="JSON file to write")
    recording.add_argument("--checkout", type=Path, default=CHECKOUT, help="whose package; default: this one")
    recording.add_argument("--only", nargs="+", choices=RUN_NAMES, metavar="NAME")
    recording.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each; default 2")
    recording.add_argument("--keep", type=Path, help="a new folder for the runs, to compare files")
    recording.set_defaults(action=record)
    comparing = actions.add_parser("compare", help="print what differs, and exit with 1 if anything does")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.set_defaults(action=compare)
    options = parser.parse_args()
    sys.exit(options.action(options))


if __name__ == "__main__":
    main()
