"""Data: the training loader and its transforms beside nnU-Net's, MONAI's and TorchIO's; store formats,
patches, preparing.

`loader`: training samples a second with the whole augmentation, each contestant with its one worker on one
core. `transforms`: the augmentation alone, on patches in memory; with a GPU also ours on it. `store`: file
formats for prepared cases. `read`: a patch from our store, or from the whole volume. `prepare`: from raw
files to a store, with two workers. What each contestant does, and in what it differs, opens its file in
scripts/benchmarks/peers.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import contest, datasets, reading, stores
from benchmarks.datasets import Dataset
from benchmarks.results import Row, table
from medconv import config

PARTS = ("loader", "transforms", "store", "prepare", "read")
CT_SPACING_MM, CT_TARGET_MM = (0.8, 0.8, 1.2), (1.0, 1.0, 1.5)
_COLUMNS = {
    "loader": (
        "case",
        "variant",
        "samples_per_second",
        "seconds",
        "times_as_fast",
        "spread",
        "samples",
        "about",
    ),
    "transforms": ("case", "variant", "seconds", "times_as_fast", "spread", "samples", "about"),
    "store": ("case", "variant", "MB", "write_seconds", "seconds", "cold_seconds", "ratio", "needs"),
    "read": ("case", "variant", "seconds", "cold_seconds", "times_as_fast", "ratio", "spread"),
    "prepare": (
        "case",
        "variant",
        "samples_per_second",
        "seconds",
        "times_as_fast",
        "spread",
        "samples",
        "parts",
        "about",
    ),
}
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    three = {"type": int, "nargs": 3, "metavar": ("X", "Y", "Z")}
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--nnunet-python", help="of an environment with nnunetv2; without it nnU-Net is left out"
    )
    parser.add_argument(
        "--torchio-python", help="of an environment with torchio; without it TorchIO is left out"
    )
    parser.add_argument("--sets", nargs="+", choices=("small", "large"), default=("small", "large"))
    parser.add_argument("--root", type=Path, help="a Decathlon folder in place of the generated small set")
    parser.add_argument(
        "--scratch", type=Path, help="keeps generated and prepared data; else a temporary folder does"
    )
    parser.add_argument("--small-shape", **three, default=[35, 50, 36], help="voxels")  # type: ignore[arg-type]
    parser.add_argument("--small-patch", **three, default=[40, 56, 40], help="voxels")  # type: ignore[arg-type]
    parser.add_argument("--small-cases", type=int, help="40 generated, or all of --root")
    parser.add_argument("--large-shape", **three, default=[320, 320, 200], help="voxels")  # type: ignore[arg-type]
    parser.add_argument("--large-patch", **three, default=[96, 96, 96], help="voxels")  # type: ignore[arg-type]
    parser.add_argument("--large-cases", type=int, default=3)
    parser.add_argument("--augment", default="strong", help="our option of conf/augmentation")
    parser.add_argument("--batch", type=int, default=2, help="samples in the loaders' batches")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="of our transforms alone")
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns of every contestant in `loader` and `transforms`"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--prepare-rounds", type=int, default=2)
    parser.add_argument("--reads", type=int, default=20, help="patches in `store` and `read`")
    parser.add_argument(
        "--core", type=int, help="that contestants run on; the last one where it is not given"
    )


def run(options: argparse.Namespace) -> list[Row]:
    _check(options)
    rows: list[Row] = []
    with _scratch(options):
        sets = [_dataset(options, name) for name in options.sets] if set(options.parts) - {"store"} else []
        for part in options.parts:
            if part == "store":
                rows += stores.run(options)
                continue
            for dataset in sets:
                log.info("%s, %s set", part, dataset.name)
                rows += (
                    reading.run(options, dataset) if part == "read" else contest.held(options, part, dataset)
                )
    return rows


def show(rows: Sequence[Row]) -> str:
    parts = dict.fromkeys(row["benchmark"] for row in rows)
    tables = [f"{part}\n\n{table(_in_words(rows, part), _COLUMNS[part])}" for part in parts]
    return "\n\n".join([*tables, *_in_short(rows)])


def _in_short(rows: Sequence[Row]) -> Iterator[str]:
    """Our loader's speed beside nnU-Net's and beside the better of the others'."""
    for case in dict.fromkeys(row["case"] for row in rows if row["benchmark"] == "loader"):
        speed = {
            row["variant"]: row["samples_per_second"]
            for row in rows
            if row["case"] == case and row["benchmark"] == "loader"
        }
        rivals = {
            "nnU-Net": [contest.NNUNET],
            "the better of MONAI and TorchIO": [contest.MONAI, contest.TORCHIO],
        }
        best = {name: max(speed.get(rival, 0.0) for rival in of) for name, of in rivals.items()}
        factors = [f"{speed[contest.OURS] / value:.2f} times {name}" for name, value in best.items() if value]
        yield f"{case}: ours gives {', '.join(factors)}"


def _in_words(rows: Sequence[Row], part: str) -> list[Row]:
    def words(parts: dict[str, float]) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())

    return [{**row, "parts": words(row.get("parts", {}))} for row in rows if row["benchmark"] == part]


def _check(options: argparse.Namespace) -> None:
    """Raises: ValueError: sizes that do not fit together, an unknown option, no such interpreter or core."""
    cores = sorted(os.sched_getaffinity(0))
    options.core = cores[-1] if options.core is None else options.core
    if options.core not in cores:
        raise ValueError(f"--core must be one of {cores}, got {options.core}")
    for key in ("batch", "rounds", "prepare_rounds", "reads", "large_cases", "small_cases"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise ValueError(f"--{key.replace('_', '-')} must be at least 1, got {value}")
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {options.seconds:g}")
    for key in ("small_shape", "small_patch", "large_shape", "large_patch", "batches"):
        if min(getattr(options, key)) < 1:
            raise ValueError(f"--{key.replace('_', '-')} must be at least 1, got {getattr(options, key)}")
    if any(patch > n for patch, n in zip(options.large_patch, options.large_shape, strict=True)):
        raise ValueError(
            f"--large-patch {options.large_patch} must fit into --large-shape {options.large_shape}"
        )
    options_there = sorted(path.stem for path in (config.conf_dir() / "augmentation").glob("*.yaml"))
    options_there.remove("monai")  # not ours: it is a contestant
    if options.augment not in options_there:
        raise ValueError(f"--augment must be one of {', '.join(options_there)}, got {options.augment}")
    _check_peers(options)


def _check_peers(options: argparse.Namespace) -> None:
    for name, peer in (("nnunet", "nnU-Net"), ("torchio", "TorchIO")):
        python = getattr(options, f"{name}_python")
        if python is None and set(options.parts) & {"loader", "transforms", "prepare"}:
            log.warning("%s is left out: --%s-python names no python that has it", peer, name)
        elif python is not None and shutil.which(python) is None:
            raise ValueError(f"--{name}-python: needed a python executable, got {python}")


@contextmanager
def _scratch(options: argparse.Namespace) -> Iterator[None]:
    """`options.scratch` is a folder while this lasts."""
    if options.scratch is not None:
        options.scratch = options.scratch.resolve()
        options.scratch.mkdir(parents=True, exist_ok=True)
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        options.scratch = Path(folder)
        yield


def _dataset(options: argparse.Namespace, name: str) -> Dataset:
    """In nnU-Net's layout; made where it is not there yet."""
    if name == "large":
        shape, cases, patch = options.large_shape, options.large_cases, tuple(options.large_patch)
        raw = datasets.generated(options.scratch, "Large", 2, shape, cases, CT_SPACING_MM, "CT")
        return Dataset(f"CT-like {'x'.join(map(str, shape))}", raw, patch, CT_SPACING_MM, CT_TARGET_MM)
    patch = tuple(options.small_patch)
    if options.root is not None:
        raw = datasets.linked(options.scratch, 1, options.root, options.small_cases)
        own = datasets.spacing_of(raw)
        return Dataset(raw.name.partition("_")[2], raw, patch, own, own)
    cases, own = options.small_cases or 40, (1.0, 1.0, 1.0)
    raw = datasets.generated(options.scratch, "Small", 1, options.small_shape, cases, own, "MRI")
    return Dataset(f"MR-like {'x'.join(map(str, options.small_shape))}", raw, patch, own, own)
