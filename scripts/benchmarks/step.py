"""A training step of a 3D U-Net: every switch alone, the presets, and the same step in nnU-Net and in
plain Lightning.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.memory import step_memory
from benchmarks.peers import dynunet
from benchmarks.peers.process import DYNUNET, NNUNET, PeerProcess
from benchmarks.results import Row, by, conditions, table
from medconv.features.autotune import search
from medconv.features.autotune.measured_once import Backends
from medconv.features.autotune.search import choices
from medconv.features.autotune.trial import Choice, Trial, Work
from medconv.features.diagnosis.alternating import alternate
from medconv.models.unet import UNet
from medconv.targets.label_map import LabelMapTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy
from medconv.utils.hardware import resolve_precision

REFERENCE = "perf=reference"
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--patch", type=int, nargs="+", default=[40, 56, 40], help="voxels")
    parser.add_argument("--channels", type=int, default=1, help="of the image")
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--features", type=int, nargs="+", default=[32, 64, 128, 256], help="channels per stage"
    )
    parser.add_argument("--norm", choices=("instance", "batch"), default="instance")
    parser.add_argument("--pairs", type=int, default=15, help="rounds of all variants in turn")
    parser.add_argument("--compile", action="store_true", help="also compiled; a minute or two more")
    parser.add_argument("--peers", nargs="*", choices=("nnunet", "dynunet"), default=["dynunet"])
    parser.add_argument("--nnunet-python", help="of an environment with nnunetv2, for --peers nnunet")


def run(options: argparse.Namespace) -> list[Row]:
    if "nnunet" in options.peers and options.nnunet_python is None:
        raise ValueError("--peers nnunet needs --nnunet-python: the python of an environment with nnunetv2")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fused = _work(options, device, _unet(options))
    plain = replace(fused, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    trials = {
        name: Trial(fused if quick else plain, choice) for name, (choice, quick) in _variants(options).items()
    }
    if options.peers:  # the network of the peers, under our switches
        peers_work = replace(fused, network=dynunet.build(options))
        trials["peers' network, perf=reference"] = Trial(peers_work, Choice())
        trials["peers' network, perf=fast"] = Trial(peers_work, _fast())
    chosen = search.measure(
        fused, choices({}, fused.network, device.type == "cuda"), 30, try_compile=lambda _: options.compile
    )
    trials["perf=autotune"] = Trial(fused, chosen[0].choice)
    flags = {name: _flags(name, device) for name in trials}
    steps: dict[str, Callable[[], Any]] = {n: _under(flags[n], trial.step) for n, trial in trials.items()}
    first = {name: float(step()) for name, step in steps.items()}
    memory = {name: _under(flags[name], partial(_memory, trial, device))() for name, trial in trials.items()}
    with _peers(options, device) as peers:
        timed = alternate(
            {**steps, **{name: peer.step for name, peer in peers.items()}}, REFERENCE, options.pairs
        )
    case = (
        f"{by(options.patch)} voxels, batch {options.batch}, {by(options.features)} channels, "
        f"{options.norm} norm"
    )
    kind = {"benchmark": "step", "case": case, "reference": REFERENCE}
    rows: list[Row] = [{**kind, "variant": name, **values} for name, values in timed.items()]
    for row in rows:
        name = row["variant"]
        row["times_as_fast"] = 1 / row["ratio"]
        if name in trials:
            start = first["peers' network, perf=reference" if name.startswith("peers'") else REFERENCE]
            row |= {"loss_difference": abs(first[name] / start - 1), **memory[name]}
        if name == "perf=autotune":
            row["choice"] = str(chosen[0].choice)
        if name in peers:
            row["about"] = peers[name].about
    return [{**row, **conditions()} for row in rows]


def show(rows: Sequence[Row]) -> str:
    columns = ("variant", "seconds", "ratio", "spread", "times_as_fast", "loss_difference")
    shown = [
        {**row, **{f"{k} MB": row[f"{k}_bytes"] / 1e6 for k in ("saved", "peak") if row.get(f"{k}_bytes")}}
        for row in rows
    ]
    return f"{rows[0]['case']}\n\n" + table(shown, (*columns, "saved MB", "peak MB", "choice"))


def _variants(options: argparse.Namespace) -> dict[str, tuple[Choice, bool]]:
    """Name to switches and whether the optimizer is fused."""
    fast = _fast()
    half = fast.precision
    variants = {
        REFERENCE: (Choice(), False),
        f"precision={half} alone": (Choice(half), False),
        "channels_last alone": (Choice(channels_last=True), False),
        "channels_last and fast_norm alone": (Choice(channels_last=True, fast_norm=True), False),
        "fused_optimizer alone": (Choice(), True),
        f"{half} and channels_last": (Choice(half, channels_last=True), True),
        "perf=fast": (fast, True),
        "perf=fast, activation_checkpointing=pointwise": (
            replace(fast, activation_checkpointing="pointwise"),
            True,
        ),
        "perf=memory (activation_checkpointing=blocks)": (
            replace(fast, activation_checkpointing="blocks"),
            True,
        ),
    }
    if options.compile:
        variants["compile alone"] = (Choice(compile=True), False)
        variants["perf=fast, compile"] = (replace(fast, compile=True), True)
    return variants


def _fast() -> Choice:
    return Choice(resolve_precision("auto", "auto"), channels_last=True, fast_norm=True)


def _unet(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    strides = [2] * (len(options.features) - 1)
    return UNet(
        len(options.patch), options.channels, options.classes, options.features, strides, norm=options.norm
    )


def _work(options: argparse.Namespace, device: torch.device, network: nn.Module) -> Work:
    """With a fused optimizer."""
    image = torch.randn(options.batch, options.channels, *options.patch, device=device)
    label = torch.randint(options.classes, (options.batch, 1, *options.patch), device=device)
    targets = LabelMapTargets.of_classes([str(number) for number in range(options.classes)])
    loss = FittedLoss(DiceCrossEntropy(), targets, len(options.patch))
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    return Work(network, loss, optimizer, image, label)


def _memory(trial: Trial, device: torch.device) -> Row:
    """Of eager steps; inside a compiled one only CUDA's allocator can be asked."""
    compiled = trial.network._compiled_call_impl is not None
    return {} if compiled and device.type == "cpu" else dict(step_memory(trial.forward, trial.step, device))


def _flags(variant: str, device: torch.device) -> Backends:
    """As a training with this preset sets them; a switch alone has those of the reference."""
    if variant.endswith(REFERENCE) or "perf=" not in variant:
        return Backends("highest", False)
    return Backends("high", device.type == "cuda")


def _under(flags: Backends, function: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with flags.applied():
            return function()

    return run


@contextmanager
def _peers(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, PeerProcess]]:
    """The peers' processes, by name; each waits until a step is requested."""
    sizes = [
        "--patch",
        *map(str, options.patch),
        "--batch",
        str(options.batch),
        "--features",
        *map(str, options.features),
    ]
    sizes += [
        "--classes",
        str(options.classes),
        "--channels",
        str(options.channels),
        "--threads",
        str(torch.get_num_threads()),
        "--device",
        device.type,
    ]
    with ExitStack() as stack:
        peers = {}
        if "dynunet" in options.peers:
            peers["MONAI DynUNet, plain Lightning"] = stack.enter_context(
                PeerProcess(sys.executable, [*DYNUNET, *sizes])
            )
        if "nnunet" in options.peers:
            peers["nnU-Net"] = stack.enter_context(PeerProcess(options.nnunet_python, [*NNUNET, *sizes]))
        yield peers
