"""Contestants of the data benchmark: separate processes that take turns on one core."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.datasets import Dataset
from benchmarks.peers.process import MEDCONV_DATA, MONAI_DATA, NNUNET_DATA, TORCHIO_DATA, PeerProcess
from benchmarks.results import Row, by, conditions

OURS, NNUNET, NEAREST, MONAI, TORCHIO = "ours", "nnU-Net", "nnU-Net, nearest labels", "MONAI", "TorchIO"
_LIMIT_S = 1800.0  # a peer prepares the dataset before it is ready
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contestant:
    python: str
    script: Sequence[str]
    settings: tuple[str, ...] = ()


def contestants(options: argparse.Namespace, mode: str) -> dict[str, Contestant]:
    """By name, the reference first; those whose environment is not given are left out."""
    entries: dict[str, Contestant] = {}
    if options.nnunet_python:
        entries[NNUNET] = Contestant(options.nnunet_python, NNUNET_DATA)
        if mode != "prepare":
            entries[NEAREST] = Contestant(options.nnunet_python, NNUNET_DATA, ("--labels", "nearest"))
    if mode == "prepare":
        return {**entries, OURS: Contestant(sys.executable, MEDCONV_DATA)}
    entries[MONAI] = Contestant(sys.executable, MONAI_DATA)
    if options.torchio_python:
        entries[TORCHIO] = Contestant(options.torchio_python, TORCHIO_DATA)
    if mode == "loader":
        return {**entries, OURS: Contestant(sys.executable, MEDCONV_DATA)}
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        name = OURS if device == "cpu" else f"{OURS}, on the GPU"
        for size in options.batches:
            settings = ("--batch", str(size), "--device", device)
            entries[f"{name}, batch {size}"] = Contestant(sys.executable, MEDCONV_DATA, settings)
    return entries


def held(options: argparse.Namespace, mode: str, dataset: Dataset) -> list[Row]:
    """Run one contest: every contestant in turn, round by round.

    Returns: a row each: `seconds` for one sample (or case), the mean over all rounds, as most samples are
        cheap and few are dear; `ratio` to the reference likewise, `spread` of that ratio over the rounds
        (from the first to the third quartile).
    """
    rivals = contestants(options, mode)
    spacing_mm = dataset.target_mm if mode == "prepare" else dataset.spacing_mm
    common = [
        "--mode",
        mode,
        "--raw",
        str(dataset.raw),
        "--scratch",
        str(dataset.home),
        "--augment",
        options.augment,
    ]
    common += [
        "--patch",
        *map(str, dataset.patch),
        "--spacing",
        *map(str, spacing_mm),
        "--batch",
        str(options.batch),
    ]
    if mode != "prepare":
        common += ["--core", str(options.core)]
    reference = next(iter(rivals))
    with _processes(rivals, common) as peers:
        if mode == "prepare":
            answers = _rounds(peers, 0.0, options.prepare_rounds, warm_up=0)
        else:
            answers = _rounds(peers, options.seconds, options.rounds, warm_up=1)
        about = {
            name: {"about": peer.about["name"], "cores": len(peer.about["cores"])}
            for name, peer in peers.items()
        }
    case = f"{dataset.name}, " + (
        f"to {by(spacing_mm)} mm" if mode == "prepare" else f"patch {by(dataset.patch)}"
    )
    kind = {"benchmark": mode, "case": case, "reference": reference, **conditions(), "threads": 1}
    for name, rival in rivals.items():
        about[name]["device"] = "cuda" if "cuda" in rival.settings else "cpu"
    return [
        {**kind, "variant": name, **row, **about[name]} for name, row in compared(answers, reference).items()
    ]


def compared(answers: Mapping[str, Sequence[Mapping[str, Any]]], reference: str) -> dict[str, Row]:
    """From each contestant's answers, round by round."""

    def per_sample(of: Sequence[Mapping[str, Any]]) -> float:
        return sum(a["seconds"] for a in of) / sum(a["samples"] for a in of)

    rows = {}
    for name, of in answers.items():
        ratios = sorted(
            per_sample([a]) / per_sample([b]) for a, b in zip(of, answers[reference], strict=True)
        )
        mean = per_sample(of)
        rows[name] = {
            "seconds": mean,
            "samples_per_second": 1 / mean,
            "ratio": mean / per_sample(answers[reference]),
            "spread": ratios[(3 * len(ratios)) // 4] - ratios[len(ratios) // 4],
            "times_as_fast": per_sample(answers[reference]) / mean,
            "samples": sum(a["samples"] for a in of),
            **({"parts": of[-1]["parts"]} if "parts" in of[-1] else {}),
        }
    return rows


def _rounds(
    peers: Mapping[str, PeerProcess], seconds: float, rounds: int, warm_up: int
) -> dict[str, list[dict[str, Any]]]:
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for number in range(warm_up + rounds):
        for name, peer in peers.items():
            answer = peer.ask(f"run {seconds}")
            if number >= warm_up:
                answers[name].append(answer)
    return answers


@contextmanager
def _processes(rivals: Mapping[str, Contestant], common: Sequence[str]) -> Iterator[dict[str, PeerProcess]]:
    """Start them one after the other, frozen except in their turns; end them in any case."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as stack:
            processes = {}
            for name, rival in rivals.items():
                start = time.perf_counter()
                arguments = [*rival.script, *common, *rival.settings]
                processes[name] = stack.enter_context(
                    PeerProcess(rival.python, arguments, _LIMIT_S, frozen=True)
                )
                log.info("%s is ready after %.0f s", name, time.perf_counter() - start)
            yield processes
    finally:
        signal.signal(signal.SIGTERM, previous)
