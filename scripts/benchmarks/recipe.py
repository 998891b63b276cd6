"""Dice over training time: our training, nnU-Net's and a plain MONAI loop on the same cases and cores."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import datasets, dice_curves
from benchmarks.peers import training
from benchmarks.results import Row, conditions, table
from benchmarks.trainings import Entry, Processes
from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import auto
from medconv.data.io.images import read_label
from medconv.data.splits import grouped, split_fold
from medconv.metrics import dice
from medconv.metrics.dice import mean, mean_per_class
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.run_dir import short_hash
from medconv.training.summary import git_commit
from medconv.utils import signals
from medconv.utils.atomic_io import write_text

OURS = "medconv"
NAMES = {
    OURS: "medconv",
    "nnunet": "nnU-Net",
    "nnunet-resenc": "nnU-Net ResEnc M",
    "dynunet": "MONAI DynUNet, plain loop",
}
PLANNERS = {"nnunet": "ExperimentPlanner", "nnunet-resenc": "nnUNetPlannerResEncM"}
FOLDS = 5
_LEAST = 0.05  # minutes
EARLIEST = 30  # the first snapshot comes after this part of the budget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=Path, required=True, help="a dataset with a dataset.json, such as Task04_Hippocampus"
    )
    parser.add_argument(
        "--minutes", type=float, nargs="+", default=[20.0], help="budgets; each is a training of its own"
    )
    parser.add_argument(
        "--contestants", nargs="+", default=[OURS, "dynunet"], choices=list(NAMES), metavar="NAME"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of our training")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/recipe"), help="kept; what is finished is not repeated"
    )
    parser.add_argument(
        "--nnunet-python", help="of an environment with nnunetv2, for the contestants nnunet*"
    )
    parser.add_argument("--cores", help="that all are held to, such as 0,1; default: every core there is")
    parser.add_argument("--threads", type=int, help="of torch; default: as many as cores")
    parser.add_argument(
        "--pairs", action="store_true", help="two contestants at a time, each on one core of the first two"
    )
    parser.add_argument(
        "--fold", type=int, default=0, help=f"of {FOLDS}; fold k holds the cases of nnU-Net's fold k"
    )
    parser.add_argument(
        "--group-pattern", help="as data.group_pattern: cases of a group, such as a patient, stay together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--snapshots", type=int, default=10, help="weights that are scored, denser early; the last at the end"
    )
    parser.add_argument(
        "--score-cases", type=int, help="validation cases of all snapshots but the last; default: all"
    )
    parser.add_argument("--plot", type=Path, help="an SVG of Dice against time")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="--json of earlier calls, to be drawn as well"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Prepare, train, predict and score what is not finished.

    Raises: ValueError: options that do not fit, or contestants that failed; the others are finished by then.
    """
    earlier = _earlier(options.beside)
    slots, bench = _slots(options), _Bench.of(options)
    entries = [
        bench.entry(name, minutes, len(slots[0]))
        for minutes in options.minutes
        for name in options.contestants
    ]
    waiting = [entry for entry in entries if entry.result() is None]
    processes = Processes()
    with signals.raising():
        for entry in waiting:
            processes.run("prepare", [entry], [sorted({core for slot in slots for core in slot})])
        for first in range(0, len(waiting), len(slots)):
            together = waiting[first : first + len(slots)]
            processes.run("train", together, slots)
            processes.run("predict", together, slots)
            targets = SegmentationTargets.from_plain(bench.dataset.targets.plain())
            for entry in together:
                if str(entry.folder) not in processes.errors:
                    entry.keep(scored(entry, bench.val, targets))
    if processes.errors:
        raise ValueError(
            f"{len(processes.errors)} of {len(entries)} trainings failed\n"
            + "\n".join(processes.errors.values())
        )
    rows = [_row(entry, bench, len(slots[0])) for entry in entries]
    if options.plot:
        note = f"; small dots: {options.score_cases} of the cases" if options.score_cases else ""
        dice_curves.draw([_curve(row) for row in [*rows, *earlier]], options.plot, rows[0]["case"] + note)
    return rows


def show(rows: Sequence[Row]) -> str:
    columns = (
        "variant",
        "minutes",
        "training_seconds",
        "steps",
        "million_weights",
        "dice",
        *rows[0]["dice_per_class"],
    )
    shown = [
        {**row, **{k: f"{v:.4f}" for k, v in _dice(row)}, "minutes": row["seconds"] / 60} for row in rows
    ]
    return f"{rows[0]['case']}\n\n" + table(shown, columns)


@dataclass(frozen=True)
class _Bench:
    """The settings of all contestants. Args: raw: the dataset in nnU-Net's layout; None if unused."""

    options: argparse.Namespace
    dataset: Dataset
    train: list[Case]
    val: list[Case]
    raw: Path | None
    output: Path

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Bench:
        _check(options)
        dataset = auto(options.root)
        pattern = options.group_pattern
        cases = grouped(dataset.cases, pattern) if pattern else dataset.cases
        train, val = split_fold(cases, options.fold, FOLDS)
        output = options.output.resolve()
        output.mkdir(parents=True, exist_ok=True)
        raw = (
            datasets.linked(output / "raw", 1, options.root, None)
            if PLANNERS.keys() & set(options.contestants)
            else None
        )
        split = [{"train": [case.id for case in train], "val": [case.id for case in val]}]
        write_text(output / f"split-{options.fold}.json", json.dumps(split))
        return cls(options, dataset, train, val, raw, output)

    def entry(self, name: str, minutes: float, cores: int) -> Entry:
        options, seconds = self.options, minutes * 60
        own = {OURS: options.set, **{name: [planner] for name, planner in PLANNERS.items()}}.get(name, [])
        folder = f"{name}-{short_hash(sorted(own))}" if name == OURS and own else name
        job = training.Job(
            root=str(options.root.resolve()),
            raw=str(self.raw or ""),
            splits=str(self.output / f"split-{options.fold}.json"),
            prepared=str(self.output / "prepared" / f"{self.dataset.name}-{len(self.dataset.cases)}" / name),
            folder=str(self.output / f"{minutes:g}min" / folder),
            train=[case.id for case in self.train],
            val=[case.id for case in self.val],
            score_cases=options.score_cases or len(self.val),
            seconds=seconds,
            times=times(seconds, options.snapshots),
            threads=options.threads or cores,
            seed=options.seed,
            settings=own,
        )
        shared = {
            "cores": cores,
            "pairs": options.pairs,
            "fold": options.fold,
            "group_pattern": options.group_pattern,
            "snapshots": options.snapshots,
        }
        stands_on = {
            key: getattr(job, key)
            for key in ("root", "seconds", "threads", "seed", "settings", "score_cases")
        }
        label = ", ".join([NAMES[name], *own]) if name == OURS else NAMES[name]
        return Entry(label, _command(name, options.nnunet_python), job, {**shared, **stands_on})


def times(seconds: float, snapshots: int) -> list[float]:
    """When to save snapshots before the end: a geometric progression from `seconds` / `EARLIEST` on."""
    last = max(1, snapshots - 1)
    return [seconds * EARLIEST ** (number / last - 1) for number in range(last)][: snapshots - 1]


def scored(entry: Entry, val: Sequence[Case], targets: SegmentationTargets) -> Row:
    """A result: Dice of the last weights on all cases, and the `curve` of all weights on those that all
    are scored on.
    """
    references = {case.id: case.label for case in val}
    content = json.loads((entry.folder / training.DONE).read_text())
    curve = []
    cases: dict[str, dice.ClassScores] = {}
    for snapshot in entry.job.snapshots:
        folder, cases = entry.job.predictions(snapshot), {}
        for case in snapshot["cases"]:
            label = references[case]
            assert label is not None
            cases[case] = dice.dice(read_label(folder / f"{case}.nii.gz")[0], read_label(label)[0], targets)
        first = [cases[case] for case in entry.job.val[: entry.job.score_cases]]
        per_class = mean_per_class(first)
        scores = {"dice": mean(per_class.values()), "dice_per_class": per_class, "cases": len(first)}
        curve.append({"seconds": snapshot["seconds"], "steps": snapshot["steps"], **scores})
    per_class = mean_per_class(list(cases.values()))
    result = {"dice": mean(per_class.values()), "dice_per_class": per_class, "cases": cases, "curve": curve}
    return {"about": content["about"], "git_commit": git_commit(), "conditions": conditions(), **result}


def _row(entry: Entry, bench: _Bench, cores: int) -> Row:
    result, dataset = entry.result(), bench.dataset
    assert result is not None
    on = f"{cores} CPU core{'s' if cores > 1 else ''}"
    parts = f"fold {bench.options.fold}: {len(bench.train)} cases to train on, {len(bench.val)} to validate"
    return {
        "benchmark": "recipe",
        "case": f"{dataset.name}, {parts}; {on}",
        "variant": entry.name,
        "seconds": entry.job.seconds,
        "training_seconds": result["curve"][-1]["seconds"],
        "steps": result["curve"][-1]["steps"],
        **{key: result[key] for key in ("dice", "dice_per_class", "curve", "about", "git_commit")},
        "million_weights": result["about"]["parameters"] / 1e6,
        **result["conditions"],
        "cores": cores,
        "threads": entry.job.threads,
        "torch": result["about"]["torch"],
    }


def _dice(row: Row) -> list[tuple[str, float]]:
    return [(k, v) for k, v in {"dice": row["dice"], **row["dice_per_class"]}.items() if v is not None]


def _curve(row: Row) -> dice_curves.Curve:
    points = tuple((point["seconds"], point["dice"] or 0.0) for point in row["curve"])
    return dice_curves.Curve(row["variant"], points, row["dice"] or 0.0)


def _earlier(files: Sequence[Path]) -> list[Row]:
    """Raises: ValueError: a file that is missing or not of this benchmark."""
    rows: list[Row] = []
    for path in files:
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            rows += [{key: row[key] for key in ("variant", "curve", "dice")} for row in earlier]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"--beside {path}: no rows of this benchmark ({error})") from error
    return rows


def _command(name: str, nnunet_python: str | None) -> tuple[str, ...]:
    if name in PLANNERS:
        return (str(nnunet_python), str(Path(training.__file__).with_name("nnunet_train.py")))
    return (sys.executable, "-m", f"benchmarks.peers.{name}_train")


def _slots(options: argparse.Namespace) -> list[list[int]]:
    """The cores of each of the parallel trainings. Raises: ValueError: cores that the machine lacks."""
    available = sorted(os.sched_getaffinity(0))
    words = options.cores.split(",") if options.cores else map(str, available)
    cores = sorted({int(word) if word.strip().isdecimal() else -1 for word in words})
    if not cores or not set(cores) <= set(available):
        raise ValueError(f"--cores must be some of {','.join(map(str, available))}, got {options.cores}")
    if options.pairs and len(cores) < 2:
        raise ValueError(f"--pairs needs two cores, got {','.join(map(str, cores))}")
    return [[core] for core in cores[:2]] if options.pairs else [cores]


def _check(options: argparse.Namespace) -> None:
    if PLANNERS.keys() & set(options.contestants) and options.nnunet_python is None:
        raise ValueError(
            "contestant nnunet needs --nnunet-python: the python of an environment with nnunetv2"
        )
    numbers = {"--minutes": min(options.minutes), "--snapshots": options.snapshots}
    numbers |= {"--threads": options.threads, "--score-cases": options.score_cases}
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be more than 0, got {value}")
    if min(options.minutes) < _LEAST:
        raise ValueError(f"--minutes must be at least {_LEAST}, got {min(options.minutes)}")
    if not 0 <= options.fold < FOLDS:
        raise ValueError(f"--fold must lie between 0 and {FOLDS - 1}, got {options.fold}")
    if len(set(options.contestants)) < len(options.contestants):
        raise ValueError(f"--contestants must be named once each, got {' '.join(options.contestants)}")
