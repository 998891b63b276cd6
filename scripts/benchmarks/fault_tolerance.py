"""Cost of fault tolerance per training step: gradient check, counter-based random numbers, checkpoints."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.results import Row, by, conditions, table
from medconv.features.diagnosis.alternating import alternate
from medconv.models.unet import UNet
from medconv.targets.label_map import LabelMapTargets
from medconv.training.callbacks.nonfinite_guard import generators
from medconv.training.checkpoint.resumable_loop import PerStepSeeding
from medconv.training.checkpoint.writer import AtomicCheckpointIO, copied
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy

STEP = "forward and backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--patch", type=int, nargs="+", default=[40, 56, 40], help="voxels")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--features", type=int, nargs="+", default=[32, 64, 128, 256], help="channels per stage"
    )
    parser.add_argument("--pairs", type=int, default=10, help="rounds of all in turn")


def run(options: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    network = UNet(len(options.patch), 1, 3, options.features, [2] * (len(options.features) - 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters())
    step = _step(network, options, device)
    step()
    optimizer.step()  # so that it has a state
    content = {"state_dict": network.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    with tempfile.TemporaryDirectory() as folder:
        timed = alternate({STEP: step, **_parts(network, content, device, Path(folder))}, STEP, options.pairs)
    numbers = sum(parameter.numel() for parameter in network.parameters())
    case = f"{by(options.patch)} voxels, batch {options.batch}, {numbers / 1e6:.1f} million parameters"
    return [
        {
            "benchmark": "fault_tolerance",
            "case": case,
            "reference": STEP,
            "variant": name,
            **values,
            **conditions(),
        }
        for name, values in timed.items()
    ]


def show(rows: Sequence[Row]) -> str:
    return f"{rows[0]['case']}\n\n" + table(rows, ("variant", "seconds", "ratio", "spread"))


def _step(network: nn.Module, options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    image = torch.randn(options.batch, 1, *options.patch, device=device)
    label = torch.randint(3, (options.batch, 1, *options.patch), device=device)
    targets = LabelMapTargets.of_classes(["background", "one", "two"])
    loss = FittedLoss(DiceCrossEntropy(), targets, len(options.patch))

    def step() -> None:
        network.zero_grad()
        loss(network(image), label).backward()

    return step


def _parts(
    network: nn.Module, content: dict[str, Any], device: torch.device, folder: Path
) -> dict[str, Callable[[], Any]]:
    draws, trainer = (
        PerStepSeeding(0),
        SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=7), global_rank=0),
    )
    writer = AtomicCheckpointIO()

    def written() -> None:
        writer.save_checkpoint(content, folder / "last.ckpt")
        writer.wait()

    return {
        "norm of the gradient, where it is not clipped": lambda: float(
            _norm(network.parameters()).isfinite()
        ),
        "random numbers by number": lambda: draws.on_train_batch_start(trainer, None, None, 0),  # type: ignore[arg-type]
        "states of random numbers kept": lambda: generators(device),
        "checkpoint, for as long as training waits: a copy": lambda: copied(content),
        "checkpoint, until it is on the disk": written,
    }


def _norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
