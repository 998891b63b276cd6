"""Wide layers against chains of thin ones: operations, the cost model, and measured seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.conv_layers import forward, image
from benchmarks.results import Row, kernel_seconds
from medconv.convs import cost_model
from medconv.features.diagnosis.alternating import alternate


def small(options: argparse.Namespace) -> list[Row]:
    """Wide layers against chains of thin ones: by number of operations, by the cost model, and measured."""
    examples = {
        "A: 64 channels at 160x120, 3-kernel": (64, [(64, 64, 3)], [(64, 14, 1), (14, 15, 3), (15, 64, 1)]),
        "B: 256 to 128 channels at 160x120, 1-kernel": (256, [(256, 128, 1)], [(256, 1, 1), (1, 128, 1)]),
    }
    rows = []
    for (case, (channels, wide, thin)), batch in ((e, b) for e in examples.items() for b in (1, 8)):
        x = image(options, batch, channels, (160, 120))
        chains = {"one wide layer": wide, "chain of thin layers": thin}
        modules = {name: _chain(steps, options) for name, steps in chains.items()}
        if options.device == "cuda":
            for name, module in list(modules.items()):
                modules[f"{name}, compiled"] = torch.compile(module, mode="reduce-overhead")  # type: ignore[assignment]
        runs = {name: forward(module, x, options) for name, module in modules.items()}
        predictions = {name: _predictions(chains[name.split(",")[0]], batch, options) for name in runs}
        calls = 10 if options.device == "cuda" else 1
        for name, timing in alternate(runs, "one wide layer", options.pairs, calls=calls).items():
            by_operations, by_model = (
                a / b for a, b in zip(predictions[name], predictions["one wide layer"], strict=True)
            )
            extra = {"kernel_seconds": kernel_seconds(runs[name])} if options.device == "cuda" else {}
            rows.append(
                {
                    "benchmark": "small",
                    "case": f"{case}, batch {batch}",
                    "variant": name,
                    "reference": "one wide layer",
                    **timing,
                    "by_operations": by_operations,
                    "predicted": by_model,
                    **extra,
                }
            )
    return rows


def _chain(steps: Sequence[tuple[int, int, int]], options: argparse.Namespace) -> nn.Module:
    convs = [nn.Conv2d(into, out, k, padding=k // 2, bias=False) for into, out, k in steps]
    return nn.Sequential(*convs).to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _predictions(
    steps: Sequence[tuple[int, int, int]], batch: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Operations, and seconds by the cost model."""
    machine = cost_model.machine_of(torch.device(options.device), getattr(torch, options.dtype))
    voxels = batch * 160 * 120
    launches = [
        cost_model.convolution(into, out, (k, k), voxels, voxels, machine=machine) for into, out, k in steps
    ]
    return sum(launch.operations for launch in launches), machine.seconds(launches)
