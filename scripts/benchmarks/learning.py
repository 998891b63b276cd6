"""Short trainings with every convolution on few and many cases, compared case by case."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import medconv
from benchmarks import gains
from benchmarks.results import Row, table
from medconv.data.case import Case
from medconv.data.splits import grouped, split_fold
from medconv.training.data_setup import find_data
from medconv.training.run_dir import short_hash
from medconv.utils.progress import track

log = logging.getLogger(__name__)

PLAIN = "plain"
SCRIPTS = Path(__file__).parents[1]
VARIANTS = {
    PLAIN: ["conv=none"],
    "plain, flips": ["conv=none", "augmentation.mirror_axes=[0]"],
    "basis": ["conv=basis"],
    "basis, half": ["conv=basis", "conv.share=0.5"],
    "basis, kernels of 5": ["conv=basis", "model.kernel_size=5"],
    "ball": ["conv=ball"],
    "ball, kernels of 5": ["conv=ball", "model.kernel_size=5"],
    "plain, kernels of 5": ["conv=none", "model.kernel_size=5"],
    "turns": ["conv=turns"],
    "acs": ["conv=acs"],
    "acs, from 2D": ["conv=acs", "conv.init_from_weights=true", "init.inflate_2d=acs"],
    "rates by tap": ["conv=none", "conv._target_=benchmarks.tap_rates.tap_rates"],
    "mirror": ["conv=mirror"],
    "mirror, equal weights": ["conv=mirror", "model.channels=[22,46,90,180]"],
    "basis, equal weights": ["conv=basis", "model.channels=[26,52,104,208]"],
    "transform": ["conv=transform"],
    "transform, wide": ["conv=transform", "model.channels=[48,96,192,384]"],
    "smooth": ["conv=smooth"],
    "smooth throughout": ["conv=smooth", "conv.throughout=true"],
    "masked": ["conv=masked"],
    "spacing": ["conv=spacing"],
    "bottleneck": ["conv=bottleneck"],
    "separable": ["conv=separable"],
    "se": ["conv=se"],
}
# What is trained before a variant, on the same cases, for the weights that it begins with; no variant itself
BEFORE = {"acs, from 2D": ["data.spatial_dims=2", "data.batch_size=16"]}
CHANNELS = [16, 32, 64, 128]
DATA = ["data=auto"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=Path, required=True, help="folder of a dataset, such as Task04_Hippocampus"
    )
    add_layout(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/learning"), help="run folders; done ones are not repeated"
    )
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME"
    )
    parser.add_argument(
        "--cases", nargs="+", default=["10", "40", "all"], help="training cases, numbers or `all`"
    )
    parser.add_argument("--group-pattern", help="as data.group_pattern: cases of a patient stay together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each training")
    parser.add_argument(
        "--channels", type=int, nargs="+", default=CHANNELS, help="of each stage of the network"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every training"
    )
    parser.add_argument("--plot", type=Path, help="an SVG of the gain over plain, with intervals")
    parser.add_argument("--per-case", type=Path, help="a CSV of every case's Dice")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="--json of earlier calls, to be drawn as well"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="trainings at a time, one thread each if more than one"
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", nargs="+", default=DATA, metavar="KEY=VALUE", help="how the folder is read")


def cases_of(options: argparse.Namespace) -> tuple[Case, ...]:
    return find_data(medconv.compose(_data_settings(options)).data).cases


def _data_settings(options: argparse.Namespace) -> list[str]:
    return [*options.data, f"data.root={options.root.resolve()}"]


def run(options: argparse.Namespace) -> list[Row]:
    """Train what is not trained yet, and compare every variant with `plain` on the same validation cases."""
    output: Path = options.output.resolve() / options.root.resolve().name
    output.mkdir(parents=True, exist_ok=True)
    found = cases_of(options)
    if options.group_pattern:
        found = grouped(found, options.group_pattern)
    for cases in options.cases:
        _write_splits(found, cases, options.seeds, _splits(output, cases, options))
    jobs = list(product(options.cases, range(options.seeds), options.variants))
    with ThreadPoolExecutor(options.jobs) as pool:
        work = [pool.submit(_train, *job, options, output) for job in jobs]
        for future in track(work, "training"):
            future.result()
    rows = [
        row for cases in options.cases for row in compare(_folder(output, cases, options), cases, options)
    ]
    if options.per_case:
        _write_per_case(output, options)
    if options.plot:
        gains.draw(
            [*rows, *(row for path in options.beside for row in json.loads(path.read_text()))], options.plot
        )
    return rows


def compare(folder: Path, cases: str, options: argparse.Namespace) -> list[Row]:
    """One row for every variant that has been trained on so many cases."""
    rows = []
    plain = _scores(folder / PLAIN)
    found = {variant: _scores(folder / slug(variant)) for variant in VARIANTS}
    found = {variant: scores for variant, scores in found.items() if scores}
    comparisons = max(1, len(found.keys() - {PLAIN}))
    for variant, mine in found.items():
        dice = np.array([np.mean(list(scores.values())) for scores in mine.values()])
        low, high, mean = paired(mine, plain, comparisons)
        rows.append(
            {
                "benchmark": "learning",
                "data": options.root.name,
                "case": ", ".join(
                    [f"{cases} training cases", f"{options.steps} steps", *_read_as(options), *options.set]
                ),
                "variant": variant,
                "reference": PLAIN,
                "dice": float(dice.mean()),
                "seeds": len(mine),
                "dice_of_seeds": [round(float(d), 4) for d in dice],
                "difference": mean,
                "low": low,
                "high": high,
                "million_weights": _weights(folder / slug(variant)),
            }
        )
    return rows


def show(rows: Sequence[Row]) -> str:
    return table(rows, ("case", "variant", "million_weights", "seeds", "dice", "difference", "low", "high"))


def _folder(output: Path, cases: str, options: argparse.Namespace) -> Path:
    channels = [] if options.channels == CHANNELS else [f"channels {options.channels}"]
    changed = [*options.set, *channels, *_read_as(options)]
    others = [short_hash(sorted(changed))] if changed else []
    return output / "-".join([cases, str(options.steps), *others])


def _read_as(options: argparse.Namespace) -> list[str]:
    """How the folder is read and its cases are grouped, where it is not the default."""
    layout = [] if options.data == DATA else options.data
    return [*layout, *([f"grouped by {options.group_pattern}"] if options.group_pattern else [])]


def slug(variant: str) -> str:
    return variant.replace(", ", "-").replace(" ", "-")


def _train(cases: str, seed: int, variant: str, options: argparse.Namespace, output: Path) -> None:
    folder = _folder(output, cases, options) / slug(variant) / str(seed)
    if summary(folder).get("status") == "done":
        return
    settings = VARIANTS[variant]
    if variant in BEFORE:
        before = _folder(output, cases, options) / f"before-{slug(variant)}" / str(seed)
        _run(before, cases, seed, BEFORE[variant], options, output)
        settings = [*settings, f"init.pretrained={before / 'checkpoints/last.ckpt'}"]
    _run(folder, cases, seed, settings, options, output)


def _run(
    folder: Path, cases: str, seed: int, settings: list[str], options: argparse.Namespace, output: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "medconv.cli",
        "train",
        *_data_settings(options),
        f"data.cache_dir={output / 'prepared'}",
        f"data.splits_file={_splits(output, cases, options)}",
        f"data.fold={seed}",
        "data.batch_size=2",
        "data.samples_per_epoch=1000000",
        "data.num_workers=0",
        "data.prepare_workers=1",
        f"trainer.max_steps={options.steps}",
        "trainer.enable_progress_bar=false",
        f"model.channels={options.channels}",
        *settings,
        *options.set,
        f"seed={seed}",
        f"run.dir={folder}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")]),
    }
    if options.jobs > 1:
        environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        log.error("%s failed: %s", folder, done.stderr.strip()[-500:])


def _splits(output: Path, cases: str, options: argparse.Namespace) -> Path:
    others = [short_hash(_read_as(options))] if _read_as(options) else []
    return output / f"{'-'.join(['splits', cases, *others])}.json"


def _write_splits(found: Sequence[Case], cases: str, seeds: int, path: Path) -> None:
    """Fold 0's validation cases always; of its training cases a draw for each seed, which is the split's
    number.

    Raises: ValueError: more cases asked for than there are, or no number.
    """
    train, val = split_fold(found, 0, 5, None)
    ids = sorted(case.id for case in train)
    if cases != "all" and not (cases.isdigit() and 0 < int(cases) <= len(ids)):
        raise ValueError(f"--cases must be `all` or numbers from 1 to {len(ids)}, got {cases}")
    draws = [
        ids if cases == "all" else sorted(random.Random(seed).sample(ids, int(cases)))
        for seed in range(seeds)
    ]
    splits = [{"train": draw, "val": [case.id for case in val]} for draw in draws]
    path.write_text(json.dumps(splits))


def summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _scores(folder: Path) -> dict[int, dict[str, float]]:
    """Seed to case to Dice, mean over its foreground classes, of a variant's finished trainings."""
    scores_by_seed = {}
    for run_folder in sorted(folder.glob("*")):
        result, seed = summary(run_folder), int(run_folder.name)
        if result.get("status") == "done":
            rows = {
                case: [v for v in row.values() if v is not None] for case, row in result["val/cases"].items()
            }
            scores_by_seed[seed] = {case: float(np.mean(values)) for case, values in rows.items() if values}
    return scores_by_seed


def paired(
    mine: dict[int, dict[str, float]], plain: dict[int, dict[str, float]], comparisons: int = 1
) -> tuple[float | None, float | None, float | None]:
    """Mean difference to plain over the seeds that both have, with Student's interval: low, high, mean.

    Args:
        comparisons: with plain; all their intervals hold together with 95 % (Bonferroni).
    Returns:
        No interval for fewer than two seeds.
    """
    seeds = sorted(mine.keys() & plain.keys())
    if not seeds:
        return None, None, None
    gaps = []
    for seed in seeds:
        cases = mine[seed].keys() & plain[seed].keys()
        gaps.append(float(np.mean([mine[seed][case] - plain[seed][case] for case in cases])))
    mean = float(np.mean(gaps))
    if len(gaps) < 2:
        return None, None, mean
    error = float(np.std(gaps, ddof=1)) / len(gaps) ** 0.5
    reach = float(stats.t.ppf(1 - 0.025 / comparisons, len(gaps) - 1)) * error
    return mean - reach, mean + reach, mean


def _write_per_case(output: Path, options: argparse.Namespace) -> None:
    """Columns: training cases, variant, seed, case, dice."""
    with options.per_case.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["training_cases", "variant", "seed", "case", "dice"])
        for cases, variant in product(options.cases, options.variants):
            scores = _scores(_folder(output, cases, options) / slug(variant))
            for seed, of_cases in sorted(scores.items()):
                lines.writerows(
                    [cases, variant, seed, case, f"{of_cases[case]:.4f}"] for case in sorted(of_cases)
                )


def _weights(folder: Path) -> float | None:
    """The number of weights, from the run's log."""
    for log_file in folder.glob("*/train.log"):
        for line in log_file.read_text().splitlines():
            if "million parameters" in line:
                return float(line.split("million parameters")[0].split()[-1])
    return None
