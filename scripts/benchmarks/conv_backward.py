"""The backward pass of a convolution: ours in one call, through torch.nn.grad, and the library's own."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conv_layers import LIBRARY, image
from benchmarks.results import Row
from medconv.convs import Convolution, convolution
from medconv.features.diagnosis.alternating import alternate

REFERENCE = Path(__file__).parents[2] / "tests" / "reference" / "backward.py"

logger = logging.getLogger(__name__)


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
        x = image(options, options.batch, 64, (64, 64), needs_grad=True).float()
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
        calls_at_once = 10 if options.device == "cuda" else 1
        timing = alternate(both, f"{LIBRARY} backward", options.pairs, calls=calls_at_once)
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


class Calls(TorchDispatchMode):
    """Counts the operations that reach the library."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


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
