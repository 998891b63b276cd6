"""Dice of this checkout's `train.py` and of another checkout's, in the same minutes, one after the other."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks import dice_curves, pictures
from benchmarks.results import Row, conditions, table
from medconv.training.run_metadata import git_commit
from medconv.utils.atomic_io import write_text

HERE = Path(__file__).parents[2]
FOLDS = 5
# Student's t, two-sided 95 %, by degrees of freedom
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_BEFORE = {"cache_dir": "cache", "splits_file": "splits"}  # keys of `data`, as they once were called
_PATIENT = re.compile(r"(patient\d+)_frame\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkout", type=Path, help="folder of another version, run by the same interpreter")
    parser.add_argument("--sets", nargs="+", default=["phantom2d"], choices=SETS, metavar="NAME")
    parser.add_argument("--minutes", type=float, nargs="+", help="budgets; default: of each set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--root", type=Path, default=Path("../shared/data"), help="folder of real datasets")
    parser.add_argument("--output", type=Path, default=Path("runs/against"), help="finished runs are kept")
    parser.add_argument("--cores", help="that a training is held to, such as 0,1; default: every core")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of this one")
    parser.add_argument("--other-set", nargs="+", default=[], metavar="KEY=VALUE", help="of the other one")
    parser.add_argument(
        "--cpu-isa", help="the most that oneDNN may use, such as AVX512_CORE_BF16: a machine without AMX"
    )
    parser.add_argument("--plot", type=Path, help="folder of SVGs of Dice against minutes")


def run(options: argparse.Namespace) -> list[Row]:
    """Trains what is not finished, in turns; which of the two begins alternates.

    Raises: ValueError: options that do not fit, or a training that failed.
    """
    if not (options.checkout / "train.py").is_file():
        raise ValueError(f"{options.checkout}: no checkout of medconv, there is no train.py")
    output, rows = options.output.resolve(), []
    output.mkdir(parents=True, exist_ok=True)
    for name in options.sets:
        settings, default = SETS[name](options.root.resolve(), output)
        for minutes in options.minutes or [default]:
            for turn, seed in enumerate(options.seeds):
                sides = ("this", "other") if turn % 2 == 0 else ("other", "this")
                pair = {side: _train(options, output, name, settings, minutes, seed, side) for side in sides}
                rows += [pair["this"], pair["other"]]
    if options.plot:
        for name in options.sets:
            _draw([row for row in rows if row["set"] == name], options.plot / f"{name}.svg")
    return rows


def show(rows: Sequence[Row]) -> str:
    """Medians over the seeds, and the mean difference of the pairs with its 95 % interval."""
    lines: list[Row] = []
    for key in dict.fromkeys((row["set"], row["minutes"]) for row in rows):
        mine, other = (
            [row for row in rows if (row["set"], row["minutes"], row["variant"]) == (*key, side)]
            for side in ("this", "other")
        )
        gains = [100 * (a["dice"] - b["dice"]) for a, b in zip(mine, other, strict=True)]
        line: Row = {"set": key[0], "minutes": key[1], "seeds": len(mine)}
        for side, runs in (("this", mine), ("other", other)):
            line[f"{side}: Dice"] = f"{median(row['dice'] for row in runs):.4f}"
            line[f"{side}: steps"] = int(median(row["steps"] for row in runs))
        lines.append({**line, "points gained": f"{fmean(gains):+.2f}{_interval(gains)}"})
    return table(lines, list(lines[0])) + f"\n\n{rows[0]['hardware']}, cores {rows[0]['cores']}"


def _interval(gains: Sequence[float]) -> str:
    freedom = len(gains) - 1
    if freedom < 1:
        return ""
    return f" ± {_T.get(freedom, 2.0) * stdev(gains) / len(gains) ** 0.5:.2f}"


def _train(
    options: argparse.Namespace,
    output: Path,
    name: str,
    settings: Sequence[str],
    minutes: float,
    seed: int,
    side: str,
) -> Row:
    """The row of one training; of a finished one without training again. Raises: ValueError: it failed."""
    checkout, own = (HERE, options.set) if side == "this" else (options.checkout, options.other_set)
    folder = output / name / f"{minutes:g}min" / f"seed{seed}" / side
    settings = [*settings, f"data.cache_dir={output / f'prepared-{side}'}"]
    settings = _as_called_there(checkout, settings)
    # a finished training says so in its summary, and a stopped one goes on
    seconds = round(60 * minutes)
    time_text = f"00:{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    command = [sys.executable, "train.py", *settings, f"seed={seed}", f"trainer.max_time={time_text}"]
    command += [f"run.dir={folder}", "logger=none"]
    cores = sorted(int(core) for core in options.cores.split(",")) if options.cores else None
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    if options.cpu_isa:
        environment |= {"ONEDNN_MAX_CPU_ISA": options.cpu_isa}
    if cores:
        environment |= {"OMP_NUM_THREADS": str(len(cores))}
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    print(f"{name}, {minutes:g} minutes, seed {seed}: {side}", file=sys.stderr)
    done = subprocess.run(
        [*command, *own], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    write_text(output / "last.log", done.stdout + done.stderr)
    if done.returncode:
        raise ValueError(f"{folder}: {' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    score = next(key for key in ("val/dice", "val/auc") if key in summary)
    row = {
        "benchmark": "against",
        "set": name,
        "minutes": minutes,
        "seed": seed,
        "variant": side,
        "commit": summary["git_commit"],
        "score": score,
        "dice": summary[score],
        **{key: summary[key] for key in ("steps", "wall_seconds", "samples_per_second")},
        **conditions(),
        "hardware": summary["hardware"]["name"] + (f", {options.cpu_isa}" if options.cpu_isa else ""),
        "cores": len(cores) if cores else conditions()["cores"],
        "git_commit": git_commit(),
    }
    write_text(folder / "row.json", json.dumps(row, indent=1) + "\n")
    return row


def _as_called_there(checkout: Path, settings: Sequence[str]) -> list[str]:
    """The settings with the names that keys of `data` have in a checkout."""
    keys = (checkout / "conf/data/base.yaml").read_text()
    renamed = list(settings)
    for now, before in _BEFORE.items():
        if f"\n{now}:" not in keys:
            renamed = [setting.replace(f"data.{now}=", f"data.{before}=") for setting in renamed]
    return renamed


def _draw(rows: Sequence[Row], path: Path) -> None:
    """The median over the seeds for each budget."""
    curves = []
    for side in ("this", "other"):
        minutes = sorted({row["minutes"] for row in rows})
        values = [
            median(row["dice"] for row in rows if row["variant"] == side and row["minutes"] == m)
            for m in minutes
        ]
        points = tuple((60 * m, value) for m, value in zip(minutes, values, strict=True))
        curves.append(dice_curves.Curve(f"{side} checkout", points, values[-1]))
    dice_curves.draw(curves, path, f"{rows[0]['set']}, {rows[0]['hardware']}, {rows[0]['cores']} cores")


def by_patient(names: Sequence[str]) -> list[dict[str, list[str]]]:
    """Folds that keep the images of a patient together; `patient001_frame01` belongs to `patient001`."""
    patients = sorted({_patient(name) for name in names})
    folds = []
    for fold in range(FOLDS):
        held = set(patients[fold::FOLDS])
        folds.append(
            {
                "train": [name for name in names if _patient(name) not in held],
                "val": [name for name in names if _patient(name) in held],
            }
        )
    return folds


def _patient(name: str) -> str:
    found = _PATIENT.fullmatch(name)
    return found.group(1) if found else name


def _phantom(dims: str) -> Any:
    return lambda root, output: ([f"data=phantom{dims}", f"data.root={output / f'phantom{dims}'}"], 1.5)


def _hippocampus(root: Path, output: Path) -> tuple[list[str], float]:
    return ["data=msd", f"data.root={root / 'Task04_Hippocampus'}"], 6.0


def _acdc(root: Path, output: Path) -> tuple[list[str], float]:
    folder, splits = root / "Dataset027_ACDC", output / "acdc-splits.json"
    names = sorted(path.name.removesuffix(".nii.gz") for path in (folder / "labelsTr").glob("*.nii.gz"))
    write_text(splits, json.dumps(by_patient(names)))
    return ["data=nnunet", f"data.root={folder}", f"data.splits_file={splits}"], 10.0


def _pictures(root: Path, output: Path) -> tuple[list[str], float]:
    images, masks = pictures.made(output / "pictures")
    return ["data=image_mask", f"data.images={images}", f"data.labels={masks}"], 3.0


SETS = {
    "phantom": _phantom(""),
    "phantom2d": _phantom("2d"),
    "hippocampus": _hippocampus,
    "acdc": _acdc,
    "pictures": _pictures,
}
