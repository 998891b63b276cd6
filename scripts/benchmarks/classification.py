"""Classifiers of a MedMNIST file: trained with several seeds and convolutions, measured on its test set."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.results import Row, conditions, table
from medconv.features.image_level.medmnist import medmnist
from medconv.training.run_dir import short_hash
from medconv.utils.progress import track

SCORES = ("auc", "accuracy", "balanced_accuracy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, required=True, help="such as pneumoniamnist.npz")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/classification"),
        help="run folders; done ones are not repeated",
    )
    parser.add_argument(
        "--variants", nargs="+", default=["conv=none"], help="overrides, several divided by commas"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each training")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every training"
    )
    parser.add_argument(
        "--checkpoint", choices=("last", "best"), default="last", help="best by validation, or the last"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="trainings at a time, one thread each if more than one"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Train what is not trained yet, then measure on the test set."""
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    options.root, options.cache = options.root.resolve(), output / "prepared"
    test = _test_part(options.root, options.cache, output)
    jobs = list(product(options.variants, range(options.seeds)))
    with ThreadPoolExecutor(options.jobs) as pool:
        work = [pool.submit(_scores, *job, options, output, test) for job in jobs]
        rows = [future.result() for future in track(work, "training")]
    return [
        _row(
            variant,
            [scores for (name, _), scores in zip(jobs, rows, strict=True) if name == variant],
            options,
        )
        for variant in options.variants
    ]


def show(rows: Sequence[Row]) -> str:
    shown = [{**row, **{name: _spread(row[name]) for name in SCORES}} for row in rows]
    return f"{rows[0]['case']}; mean over seeds (least to most)\n\n" + table(
        shown, ("variant", *SCORES, "train_seconds")
    )


def _test_part(root: Path, cache: Path, output: Path) -> Path:
    """A table of the test images alone."""
    dataset = medmnist(root, cache)
    path = output / "test.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "path", "label"])
        rows = [case for case in dataset.cases if case.split == "test"]
        writer.writerows(
            [case.id, case.images[0].resolve(), f"{(case.values or (0,))[0]:g}"] for case in rows
        )
    return path


def _scores(variant: str, seed: int, options: argparse.Namespace, output: Path, test: Path) -> Row:
    overrides = [*(word for word in _words(variant) if word), *options.set]
    folder = output / f"{short_hash([variant, options.set, options.steps, str(options.root)])}-{seed}"
    data = ["data=medmnist", f"data.root={options.root}", f"data.cache_dir={options.cache}"]
    settings = [
        f"trainer.max_steps={options.steps}",
        f"seed={seed}",
        f"run.dir={folder}",
        "trainer.enable_progress_bar=false",
    ]
    _command(["train", *data, *settings, *overrides], folder.with_suffix(".log"), options)
    answers = folder / options.checkpoint
    chosen = ["--checkpoint", str(folder / f"checkpoints/{options.checkpoint}.ckpt")]
    _command(
        ["predict", *chosen, "--input", str(test), "--output", str(answers)],
        folder.with_suffix(".log"),
        options,
    )
    measured = ["--predictions", str(answers / "predictions.csv"), "--labels", str(test)]
    _command(
        ["evaluate", *measured, "--output", str(answers / "scores.json")], folder.with_suffix(".log"), options
    )
    scores: dict[str, Any] = json.loads((answers / "scores.json").read_text())["mean"]
    return {**scores, "seconds": json.loads((folder / "summary.json").read_text())["wall_seconds"]}


def _words(variant: str) -> list[str]:
    """`conv=mirror,model=encoder` to two overrides; commas within brackets stay."""
    parts, depth = [""], 0
    for sign in variant:
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _command(words: Sequence[str], printed: Path, options: argparse.Namespace) -> None:
    """Raises: ValueError: it failed."""
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {})}
    with printed.open("a") as file:
        code = subprocess.run(
            [sys.executable, "-m", "medconv.cli", *words],
            stdout=file,
            stderr=file,
            env=environment,
            check=False,
        ).returncode
    if code:
        raise ValueError(f"{' '.join(words)} ended with code {code}; see {printed}")


def _row(variant: str, runs: Sequence[Row], options: argparse.Namespace) -> Row:
    of = f"{options.steps} steps, {options.seeds} seeds, {options.checkpoint} checkpoint"
    case = f"{options.root.name}, {of}, {' '.join(options.set)}"
    scores = {name: [scores[name] for scores in runs] for name in SCORES}
    seconds = mean(scores["seconds"] for scores in runs)
    return {
        "benchmark": "classification",
        "case": case,
        "variant": variant,
        **scores,
        "train_seconds": seconds,
        **conditions(),
    }


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
