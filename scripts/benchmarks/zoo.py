"""Dice of the defaults on every data set that is there, beside published numbers; with --against, beside
another checkout's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from omegaconf import OmegaConf

import medconv
from benchmarks import dice_curves
from benchmarks.results import Row, conditions, table
from benchmarks.zoo_sets import SETS, DataSet
from medconv.config.values import duration_text
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, dataset_folder
from medconv.planning.spacing import target_spacing
from medconv.training.data_setup import find_data
from medconv.training.summary import git_commit
from medconv.utils.atomic_io import write_text

HERE = Path(__file__).parents[2]
THIS = "this"
OTHER = "other"
MEMBERS = "members"
# Plans that somebody would pick by hand: the images' grid and two coarser ones, with two widths. The patch
# follows from grid, width and memory.
COARSER = (1.0, 1.6, 2.5)
WIDTHS = ("small", "medium")
# Student's t, two-sided 95 %, by degrees of freedom
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
# Keys of `data`, as they were called in earlier versions
_EARLIER_KEYS = {"cache_dir": "cache", "splits_file": "splits"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=list(SETS),
        metavar="NAME",
        help=f"of {', '.join(SETS)}; default: all whose files are there",
    )
    parser.add_argument("--minutes", type=float, nargs="+", default=[15.0], help="of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(os.environ.get("MEDCONV_REALDATA", "../shared/data")),
        help="folder of real data sets; default: MEDCONV_REALDATA",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/zoo"), help="finished runs are kept")
    parser.add_argument("--cores", help="that a training is held to, such as 0,1; default: every core")
    parser.add_argument(
        "--cpu-isa", help="the most that oneDNN may use, such as AVX512_CORE_BF16: a machine without AMX"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of ours")
    parser.add_argument(
        "--plans",
        action="store_true",
        help=f"also {len(COARSER) * len(WIDTHS)} plans by hand: {len(COARSER)} grids, {len(WIDTHS)} widths",
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another version, run by the same interpreter"
    )
    parser.add_argument("--other-set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides there")
    parser.add_argument(
        "--members", metavar="N|auto", help="also an ensemble that shares the minutes, see docs/ensembles.md"
    )
    parser.add_argument(
        "--plot", type=Path, help="folder of SVGs of Dice against minutes: one of each set, and all.svg"
    )


@dataclass(frozen=True)
class Training:
    """One training of the benchmark.

    Args:
        variant: `this`, `other`, `N members`, `auto members`, or the name of a plan by hand.
        checkout: the version that trains.
        overrides: of the config, beside those of the data set.
    """

    data: DataSet
    variant: str
    checkout: Path
    overrides: tuple[str, ...]
    minutes: float
    seed: int

    def folder(self, output: Path) -> Path:
        # a comma would be a list to Hydra
        name = self.variant.replace(" x spacing, ", "x-").replace(" ", "-")
        return output / self.data.name / f"{self.minutes:g}min" / f"seed{self.seed}" / name


def run(options: argparse.Namespace) -> list[Row]:
    """Train what is not finished; which of two checkouts begins alternates from seed to seed.

    Raises: ValueError: options that do not fit, or a training that failed.
    """
    if options.members and options.members != "auto" and not options.members.isdigit():
        raise ValueError(f"--members must be a number or auto, got {options.members}")
    if options.against and not (options.against / "train.py").is_file():
        raise ValueError(f"{options.against}: no checkout of medconv, there is no train.py")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    rows = []
    for data in _chosen(options):
        for minutes in options.minutes:
            for turn, seed in enumerate(options.seeds):
                trainings = _trainings(options, data, minutes, seed, output)
                if turn % 2:
                    trainings.reverse()
                rows += [_train(training, options, output) for training in trainings]
    if options.plot:
        for name in dict.fromkeys(row["set"] for row in rows):
            _draw([row for row in rows if row["set"] == name], options.plot / f"{name}.svg")
        of_label_maps = [row for row in rows if row["score"] == "val/dice"]
        if of_label_maps:
            _draw(of_label_maps, options.plot / "all.svg")
    return rows


def show(rows: Sequence[Row]) -> str:
    """A line per set, minutes and variant: the median over the seeds, and the mean difference to ours."""
    lines = []
    for name, minutes, variant in dict.fromkeys((r["set"], r["minutes"], r["variant"]) for r in rows):
        ours = _of(rows, name, minutes, THIS)
        these = _of(rows, name, minutes, variant)
        line = {
            "set": name,
            "minutes": minutes,
            "variant": variant,
            "seeds": len(these),
            these[0]["score"].removeprefix("val/"): f"{median(row['dice'] for row in these):.4f}",
            "steps": int(median(row["steps"] for row in these)),
            "spacing, patch": f"{these[0]['spacing_mm']}, {these[0]['patch_size']}",
            "points beside ours": "" if variant == THIS else _difference(these, ours),
            "published": these[0]["published"] if variant == THIS else "",
        }
        lines.append({"score": line.pop(these[0]["score"].removeprefix("val/")), **line})
    columns = ("set", "minutes", "variant", "seeds", "score", "points beside ours", "steps")
    text = table(lines, (*columns, "spacing, patch", "published"))
    return f"{text}\n\n{rows[0]['hardware']}, cores {rows[0]['cores']}"


def _of(rows: Sequence[Row], name: str, minutes: float, variant: str) -> list[Row]:
    """The rows of a variant, by seed."""
    key = (name, minutes, variant)
    chosen = [row for row in rows if (row["set"], row["minutes"], row["variant"]) == key]
    return sorted(chosen, key=lambda row: row["seed"])


def _difference(rows: Sequence[Row], ours: Sequence[Row]) -> str:
    """In points of Dice, over the same seeds, with its 95 % interval."""
    points = [100 * (row["dice"] - our["dice"]) for row, our in zip(rows, ours, strict=True)]
    freedom = len(points) - 1
    if freedom < 1:
        return f"{points[0]:+.2f}"
    half_width = _T.get(freedom, 2.0) * stdev(points) / len(points) ** 0.5
    return f"{fmean(points):+.2f} ± {half_width:.2f}"


def _chosen(options: argparse.Namespace) -> list[DataSet]:
    """Raises: ValueError: a set that was asked for is not there."""
    root = options.root.resolve()
    if not options.sets:
        return [data for data in SETS.values() if data.is_there(root)]
    chosen = [SETS[name] for name in options.sets]
    for data in chosen:
        if not data.is_there(root):
            raise ValueError(f"{root}: no {data.folder} there; --root names the folder of real data sets")
    return chosen


def _trainings(
    options: argparse.Namespace, data: DataSet, minutes: float, seed: int, output: Path
) -> list[Training]:
    settings = data.settings(options.root.resolve(), output)
    ours = (*settings, *options.set)
    trainings = [Training(data, THIS, HERE, ours, minutes, seed)]
    if options.members and data.has_label_maps:
        trainings.append(Training(data, f"{options.members} {MEMBERS}", HERE, ours, minutes, seed))
    if options.plans:
        native = _native_spacing(ours, output)
        for factor in COARSER:
            grid = ",".join(f"{mm * factor:.4g}" for mm in native)
            for width in WIDTHS:
                by_hand = (*ours, f"data.spacing_mm=[{grid}]", f"plan.size={width}")
                name = f"{factor:g} x spacing, {width}"
                trainings.append(Training(data, name, HERE, by_hand, minutes, seed))
    if options.against:
        theirs = (*settings, *options.other_set)
        trainings.append(Training(data, OTHER, options.against, theirs, minutes, seed))
    return trainings


def _native_spacing(settings: Sequence[str], output: Path) -> tuple[float, ...]:
    """The grid of a set's images, mm."""
    config = medconv.compose([*settings, f"data.cache_dir={output / 'prepared-this'}"])
    dataset = find_data(config.data)
    measured, _ = cached_fingerprint(dataset, dataset_folder(Path(config.data.cache_dir), dataset))
    return target_spacing(measured)


def _train(training: Training, options: argparse.Namespace, output: Path) -> Row:
    """The row of one training; of a finished one without training again. Raises: ValueError: it failed."""
    folder = training.folder(output)
    cache = "prepared-other" if training.variant == OTHER else "prepared-this"
    program = ["train.py"]
    parts = 1  # of the time, of which each member gets one
    if training.variant.endswith(MEMBERS):
        program = ["-m", "medconv.cli", "ensemble", "--members", options.members]
        parts = 1 if options.members == "auto" else int(options.members)
    settings = [*training.overrides, f"data.cache_dir={output / cache}", f"seed={training.seed}"]
    # a finished training says so in its summary, and a stopped one goes on
    settings += [
        f"trainer.max_time={duration_text(max(1, round(60 * training.minutes / parts)))}",
        f"run.dir={folder}",
        "logger=none",
    ]
    command = [sys.executable, *program, *_as_called_there(training.checkout, settings)]
    cores = sorted(int(core) for core in options.cores.split(",")) if options.cores else None
    environment = os.environ | {"PYTHONPATH": str(training.checkout.resolve())}
    if options.cpu_isa:
        environment |= {"ONEDNN_MAX_CPU_ISA": options.cpu_isa}
    if cores:
        environment |= {"OMP_NUM_THREADS": str(len(cores))}
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    print(
        f"{training.data.name}, {training.minutes:g} minutes, seed {training.seed}: {training.variant}",
        file=sys.stderr,
    )
    done = subprocess.run(
        command, cwd=training.checkout, env=environment, capture_output=True, text=True, check=False
    )
    write_text(output / "last.log", done.stdout + done.stderr)
    if done.returncode:
        raise ValueError(f"{folder}: {' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    row = _row(training, json.loads((folder / "summary.json").read_text()), folder)
    row["hardware"] += f", {options.cpu_isa}" if options.cpu_isa else ""
    row["cores"] = len(cores) if cores else conditions()["cores"]
    kept = folder / "row.json"
    if kept.exists():  # of a training that was finished before, with the cores that it had then
        earlier = json.loads(kept.read_text())
        row |= {key: earlier[key] for key in conditions()}
    write_text(kept, json.dumps(row, indent=1) + "\n")
    return row


def _row(training: Training, summary: dict[str, Any], folder: Path) -> Row:
    derived = OmegaConf.load(folder / "config.yaml").derived
    score = score_of(summary)
    # The mean of one network is its own score
    dice = summary["members"][-1]["score_of_mean"] if "members" in summary else summary[score]
    return {
        "benchmark": "zoo",
        "set": training.data.name,
        "minutes": training.minutes,
        "seed": training.seed,
        "variant": training.variant,
        "commit": summary["git_commit"],
        "score": score,
        "dice": dice,
        "members": len(summary.get("members", [1])),
        "published": training.data.published,
        "published_dice": training.data.published_dice,
        "size": derived.get("size"),
        "spacing_mm": " x ".join(f"{mm:.3g}" for mm in derived.spacing_mm),
        "patch_size": " x ".join(map(str, derived.patch_size)),
        **{key: summary[key] for key in ("steps", "wall_seconds", "samples_per_second")},
        **conditions(),
        "hardware": summary["hardware"]["name"],
        "git_commit": git_commit(),
    }


def score_of(summary: Mapping[str, Any]) -> str:
    """The key of a run's main score; a classifier's summary has a Dice, too, which is null."""
    return next(key for key in ("val/dice", "val/auc") if summary.get(key) is not None)


def _as_called_there(checkout: Path, settings: Sequence[str]) -> list[str]:
    """The settings with the names that keys of `data` have in a checkout."""
    keys = (checkout / "conf/data/base.yaml").read_text()
    renamed = list(settings)
    for now, before in _EARLIER_KEYS.items():
        if f"\n{now}:" not in keys:
            renamed = [setting.replace(f"data.{now}=", f"data.{before}=") for setting in renamed]
    return renamed


def _draw(rows: Sequence[Row], path: Path) -> None:
    """A curve for each set and variant: the median over the seeds for each budget."""
    curves = []
    names = list(dict.fromkeys(row["set"] for row in rows))
    for name, variant in dict.fromkeys((row["set"], row["variant"]) for row in rows):
        these = [row for row in rows if (row["set"], row["variant"]) == (name, variant)]
        points = tuple(
            (60 * budget, median(row["dice"] for row in _of(these, name, budget, variant)))
            for budget in sorted({row["minutes"] for row in these})
        )
        texts = ([name] if len(names) > 1 else []) + ([variant] if variant != THIS or len(names) == 1 else [])
        curves.append(dice_curves.Curve(", ".join(texts), points, points[-1][1], these[0]["published_dice"]))
    dice_curves.draw(curves, path, f"{', '.join(names)}; {rows[0]['hardware']}, cores: {rows[0]['cores']}")
