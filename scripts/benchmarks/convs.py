"""What the convolutions cost: against nn.Conv, against naive code, in small layers, and in their backward
pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.results import Row, alternate, conditions, kernel_seconds, table
from medconv.convs import (
    Convolution,
    acs,
    ball,
    basis,
    bottleneck,
    channel_transform,
    convolution,
    cost_model,
    masked,
    mirror,
    se,
    separable,
    smooth,
    spacing,
    transform,
)
from medconv.convs.parametrization import install

LIBRARY = "nn.Conv"
TWO = "transform, two launches"
# Stages of a U-Net: channels, and the size of a hippocampus patch in 3D, of a slice in 2D.
STAGES: dict[int, list[tuple[int, tuple[int, ...]]]] = {
    3: [(32, (40, 56, 40)), (64, (20, 28, 20)), (128, (10, 14, 10)), (256, (5, 7, 5))],
    2: [(32, (256, 256)), (64, (128, 128)), (128, (64, 64)), (256, (32, 32))],
}
# Timed a fifth as often: the differences are large.
MANY_TIMES_SLOWER = ("separable", "unfold and einsum")
REFERENCE = Path(__file__).parents[2] / "tests" / "reference" / "backward.py"

logger = logging.getLogger(__name__)
Run = Callable[[], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--pairs", type=int, default=30, help="rounds in which every variant is timed once")
    parser.add_argument("--batch", type=int, default=2, help="samples, for the stages of a U-Net")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="of autocast"
    )


def run(options: argparse.Namespace) -> list[Row]:
    around = {**conditions(), "dtype": options.dtype}
    return [{**row, **around} for part in options.parts for row in PARTS[part](options)]


def show(rows: Sequence[Row]) -> str:
    """Stages as one table for each kind of pass, ratios to the library with their spread; the other parts
    row by row.
    """
    tables = []
    grid = [row for row in rows if row["benchmark"] == "stages"]
    for kind in dict.fromkeys(row["case"].split(",")[0] for row in grid):
        of_kind = [row for row in grid if row["case"].split(",")[0] == kind]
        lines: dict[str, Row] = {}
        for row in of_kind:
            column = row["case"].split(", ")[1].replace(" channels", "")
            spread = f" ±{row['spread'] / 2:.2f}" if "spread" in row else ""
            lines.setdefault(row["variant"], {kind: row["variant"]})[column] = f"{row['ratio']:.2f}{spread}"
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        tables.append(table(list(lines.values()), columns))
    for part in ("small", "backward"):
        of_part = [row for row in rows if row["benchmark"] == part]
        skipped = ("benchmark", "reference", *conditions(), "dtype")
        if of_part:
            tables.append(table(of_part, [key for key in of_part[0] if key not in skipped]))
    return "\n\n".join(tables)


def stages(options: argparse.Namespace) -> list[Row]:
    """Forward, forward with backward, and both with AdamW's update, of every convolution at a U-Net's
    sizes.
    """
    rows = []
    for dims, sizes in STAGES.items():
        for channels, size in sizes:
            x = _image(options, options.batch, channels, size, needs_grad=True)
            layers = _layers(dims, channels, options)
            where = f"{channels} channels at {'x'.join(map(str, size))}, batch {options.batch}"
            for what, make in PASSES.items():
                runs = {name: make(layer, x, options) for name, layer in layers.items()}
                # Each in pairs with the library's: a slow variant would slow the next one down.
                for name in layers:
                    pair = {LIBRARY: runs[LIBRARY], name: runs[name]}
                    pairs = options.pairs if name not in MANY_TIMES_SLOWER else max(1, options.pairs // 5)
                    timing = {**alternate(pair, LIBRARY, pairs)[name], "pairs": pairs}
                    row = {
                        "benchmark": "stages",
                        "case": f"{dims}D {what}, {where}",
                        "variant": name,
                        "reference": LIBRARY,
                    }
                    rows.append({**row, **timing})
            logger.info("%dD, %s: measured", dims, where)
    return rows + _means(rows)


def small(options: argparse.Namespace) -> list[Row]:
    """Wide layers against chains of thin ones: by number of operations, by the cost model, and measured."""
    examples = {
        "A: 64 channels at 160x120, 3-kernel": (64, [(64, 64, 3)], [(64, 14, 1), (14, 15, 3), (15, 64, 1)]),
        "B: 256 to 128 channels at 160x120, 1-kernel": (256, [(256, 128, 1)], [(256, 1, 1), (1, 128, 1)]),
    }
    rows = []
    for (case, (channels, wide, thin)), batch in ((e, b) for e in examples.items() for b in (1, 8)):
        x = _image(options, batch, channels, (160, 120))
        chains = {"one wide layer": wide, "chain of thin layers": thin}
        modules = {name: _chain(steps, options) for name, steps in chains.items()}
        if options.device == "cuda":
            for name, module in list(modules.items()):
                modules[f"{name}, compiled"] = torch.compile(module, mode="reduce-overhead")  # type: ignore[assignment]
        runs = {name: _forward(module, x, options) for name, module in modules.items()}
        predictions = {name: _predictions(chains[name.split(",")[0]], batch, options) for name in runs}
        for name, timing in alternate(runs, "one wide layer", options.pairs).items():
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


def backward(options: argparse.Namespace) -> list[Row]:
    """Hand-written backward passes: through torch.nn.grad, as it was until torch 1.10, in one call, and the
    library's own.

    `ratio` is to the library's backward; `backward_to_forward` to the same variant's forward; `calls` are the
    operations that reach the library in one backward pass.
    """
    peers = _historic()
    functions: dict[str, type[Convolution]] = {"one call (ours)": Convolution}
    if peers is not None:
        functions |= {
            "torch.nn.grad, two calls": peers.TwoCallConvolution,
            "as until torch 1.10": peers.HistoricConvolution,
        }
    rows = []
    for stride in (1, 2):
        x = _image(options, options.batch, 64, (64, 64), needs_grad=True).float()
        weight = torch.randn(64, 64, 3, 3, device=options.device, requires_grad=True)
        makes: dict[str, Callable[[], Tensor]] = {
            LIBRARY: partial(F.conv2d, x, weight, stride=stride, padding=1)
        }
        for name, function in functions.items():
            makes[name] = partial(convolution, x, weight, stride=stride, padding=1, function=function)
        outputs = {name: make() for name, make in makes.items()}
        grad = torch.randn_like(outputs[LIBRARY])
        backs = {
            n: partial(torch.autograd.grad, y, [x, weight], grad, retain_graph=True)
            for n, y in outputs.items()
        }
        # Forward and backward of one variant in the same rounds.
        both = {f"{n} forward": make for n, make in makes.items()} | {
            f"{n} backward": back for n, back in backs.items()
        }
        timing = alternate(both, f"{LIBRARY} backward", options.pairs)
        for name, back in backs.items():
            with Calls() as calls:
                back()
            rows.append(
                {
                    "benchmark": "backward",
                    "case": f"64 to 64 channels, 3-kernel, 64x64, batch {options.batch}, stride {stride}, "
                    "float32",
                    "variant": name,
                    "reference": LIBRARY,
                    **timing[f"{name} backward"],
                    "backward_to_forward": timing[f"{name} backward"]["seconds"]
                    / timing[f"{name} forward"]["seconds"],
                    "calls": calls.count.total(),
                    "convolution_calls": sum(n for call, n in calls.count.items() if "conv" in call),
                }
            )
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "stages": stages,
    "small": small,
    "backward": backward,
}


class Calls(TorchDispatchMode):
    """Counts the operations that reach the library."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Unfolded(nn.Module):
    """The usual naive code for a convolution that torch lacks: patches, then a matrix product."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.size, self.padding = conv.weight, conv.kernel_size, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, [p for p in reversed(self.padding) for _ in range(2)])
        for axis, k in enumerate(self.size):
            x = x.unfold(2 + axis, k, 1)
        letters = "xyz"[: len(self.size)], "uvw"[: len(self.size)]
        return torch.einsum(f"bi{letters[0]}{letters[1]},oi{letters[1]}->bo{letters[0]}", x, self.weight)


class ThreePlanes(nn.Module):
    """`acs` as in its paper: three thin convolutions, concatenated."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        into, k = conv.in_channels, conv.kernel_size[0]
        outs = [len(part) for part in torch.arange(conv.out_channels).tensor_split(3)]
        sizes = [(k, k, 1), (k, 1, k), (1, k, k)]
        self.parts = nn.ModuleList(
            nn.Conv3d(into, out, size, padding="same", bias=False)
            for out, size in zip(outs, sizes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class _Forced(nn.Module):
    """`transform` in one of its two implementations, whatever the cost model says."""

    def __init__(self, conv: nn.Module, two: bool) -> None:
        super().__init__()
        self.conv, self.two = conv, two

    def forward(self, x: Tensor) -> Tensor:
        chosen = channel_transform.prefers_two_launches
        channel_transform.prefers_two_launches = lambda *_: self.two
        try:
            return self.conv(x)
        finally:
            channel_transform.prefers_two_launches = chosen


def _layers(dims: int, channels: int, options: argparse.Namespace) -> dict[str, nn.Module]:
    conv_class = {2: nn.Conv2d, 3: nn.Conv3d}[dims]

    def conv() -> Any:
        return conv_class(channels, channels, 3, padding=1, bias=False)

    dense_bank = torch.randn(channels, channels, *[3] * dims)
    regular = install(conv(), mirror.MirrorPrior((3,) * dims, (0,), True, True), False)
    layers = {
        LIBRARY: conv(),
        "transform": transform(conv()),
        "transform, folded": _Forced(transform(conv()), False),
        TWO: _Forced(transform(conv()), True),
        "transform, dense bank": transform(conv(), bank=dense_bank),
        "transform, dense bank, folded": _Forced(transform(conv(), bank=dense_bank), False),
        "transform, dense bank, two launches": _Forced(transform(conv(), bank=dense_bank), True),
        "basis": basis(conv()),
        "ball": ball(conv()),
        "spacing": spacing(conv(), spacing_mm=(1.0,) * dims),
        "smooth": smooth(conv()),
        "masked": masked(conv()),
        "mirror": regular,
        "se": se(conv()),
        "bottleneck": bottleneck(conv()),
        "separable": separable(conv()),
        "unfold and einsum": Unfolded(conv()),
    }
    if dims == 3:
        layers |= {"acs": acs(conv()), "acs, three convolutions": ThreePlanes(conv())}
    for layer in layers.values():
        layer.to(options.device, memory_format=_layout(dims))
    return layers


def _layout(dims: int) -> torch.memory_format:
    return torch.channels_last if dims == 2 else torch.channels_last_3d


def _image(
    options: argparse.Namespace, batch: int, channels: int, size: Sequence[int], needs_grad: bool = False
) -> Tensor:
    x = torch.randn(batch, channels, *size, device=options.device, dtype=getattr(torch, options.dtype))
    return x.contiguous(memory_format=_layout(len(size))).requires_grad_(needs_grad)


def _autocast(options: argparse.Namespace) -> torch.autocast:
    return torch.autocast(options.device, getattr(torch, options.dtype), enabled=options.dtype != "float32")


def _forward(layer: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    def once() -> None:
        with torch.no_grad(), _autocast(options):
            layer(x)

    return once


def _step(layer: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    with torch.no_grad(), _autocast(options):
        grad = torch.randn_like(layer(x))
    leaves = [x, *layer.parameters()]

    def once() -> None:
        with _autocast(options):
            output = layer(x)
        torch.autograd.grad(output, leaves, grad)

    return once


def _update(layer: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    """A training step: forward, backward, and the optimizer's update."""
    with torch.no_grad(), _autocast(options):
        grad = torch.randn_like(layer(x))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-6)

    def once() -> None:
        with _autocast(options):
            output = layer(x)
        output.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return once


PASSES = {"forward": _forward, "forward and backward": _step, "training step": _update}


def _means(rows: Sequence[Row]) -> list[Row]:
    """Geometric mean over the stages, per variant and kind of pass."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["case"].split(",")[0], row["variant"]), []).append(row["ratio"])
    return [
        {
            "benchmark": "stages",
            "case": f"{kind}, geometric mean of {len(ratios)} stages",
            "variant": variant,
            "reference": LIBRARY,
            "ratio": exp(sum(map(log, ratios)) / len(ratios)),
        }
        for (kind, variant), ratios in groups.items()
    ]


def _chain(steps: Sequence[tuple[int, int, int]], options: argparse.Namespace) -> nn.Module:
    convs = [nn.Conv2d(into, out, k, padding=k // 2, bias=False) for into, out, k in steps]
    return nn.Sequential(*convs).to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _predictions(
    steps: Sequence[tuple[int, int, int]], batch: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Operations, and seconds by the cost model."""
    machine, voxels = cost_model.machine_of(torch.device(options.device)), batch * 160 * 120
    launches = [
        cost_model.convolution(into, out, (k, k), voxels, voxels, machine=machine) for into, out, k in steps
    ]
    return sum(launch.operations for launch in launches), machine.seconds(launches)


def _historic() -> ModuleType | None:
    """The peers of the tests; a wheel carries none."""
    if not REFERENCE.is_file():
        logger.warning("%s is absent: the historic backward passes are left out", REFERENCE)
        return None
    spec = importlib.util.spec_from_file_location("historic_backward", REFERENCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
