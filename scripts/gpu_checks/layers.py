"""What layers cost beside their peers and the hardware's limit."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from monai.networks.nets import SegResNet
from torch import Tensor

from gpu_checks.claims import Expect, Figures, claim
from gpu_checks.limits import Peaks
from gpu_checks.networks import seconds
from gpu_checks.setting import Setting
from gpu_checks.wide import wide_conv3d
from medconv.performance.switches import apply_switches, memory_format, to_memory_format

# Inputs, outputs and edge of the finest convolutions at NVIDIA's size
_THIN = ((4, 32, 128), (32, 32, 128), (64, 32, 128), (64, 64, 64), (128, 64, 64))
_WIDTHS = (1, 2, 4)
NORM = (2, 32, 120, 168, 120)  # the finest stage of `layers --scale 3`
_NORMS = {  # ours and torch's
    "instance norm": ("ours, channels-last", "nn.InstanceNorm3d, channels-last"),
    "batch norm": ("our batch norm, channels-last", "nn.BatchNorm3d, channels-last"),
}
_PRIORS = ("transform", "basis", "ball", "spacing", "masked", "acs", "mirror", "smooth")


def _norm_limit(peaks: Peaks) -> float:
    """Forward reads x twice and writes y, backward reads both tensors twice and writes one."""
    return peaks.seconds(8 * 2 * prod(NORM))


@claim(
    "norm-price",
    "Instance and batch norm by Triton with their activation beside torch's (`benchmark.py layers`)",
    *(Expect(f"{norm}, finest stage, seconds", limit=_norm_limit) for norm in _NORMS),
    Expect("instance norm, slowest stage, times torch's speed", least=1),
    Expect("batch norm, slowest stage, times torch's speed", least=1),
    Expect("batch norm, finest stage, times torch's speed", least=1.5),
    limit_s=60,
)
def norm_price(setting: Setting) -> Figures:
    """Torch's batch norm and activation touch a tensor 13 times at best, ours 8 times: 1.6 times as fast."""
    rows = _layers(setting, "norm", "nn.InstanceNorm3d, channels-last")
    figures: dict[str, Any] = {}
    for norm, (ours, theirs) in _NORMS.items():
        own, library = (_seconds_of(rows, variant) for variant in (ours, theirs))
        ratios = [slow / fast for slow, fast in zip(library, own, strict=True)]
        figures[f"{norm}, finest stage, seconds"] = own[0]
        figures[f"{norm}, finest stage, times torch's speed"] = ratios[0]
        figures[f"{norm}, slowest stage, times torch's speed"] = min(ratios)
        stages = (f"{1e6 * fast:.0f} for {1e6 * slow:.0f}" for slow, fast in zip(library, own, strict=True))
        figures[f"{norm}, microseconds for torch's, by stage"] = ", ".join(stages)
    return figures


def _seconds_of(rows: list[dict[str, Any]], variant: str) -> list[float]:
    """By stage, the finest first."""
    return [row["seconds"] for row in rows if row["variant"] == variant]


@claim(
    "depthwise-price",
    "Depthwise convolutions as blocks beside the library's; if they win, they should be taken",
    Expect("library, finest stage, seconds", limit=lambda peaks: peaks.seconds(6 * 2 * prod(NORM))),
    limit_s=60,
)
def depthwise_price(setting: Setting) -> Figures:
    """The limit: forward, gradient of the input and of the weight each touch two tensors."""
    rows = _layers(setting, "depthwise", "nn.Conv3d, depthwise, channels-last")
    library = [row for row in rows if row["ratio"] == 1 and row["variant"] == row["reference"]]
    blocks = {
        f"{row['variant']}: {row['case'].split(',')[0]}": row["ratio"]
        for row in rows
        if "ours" in row["variant"]
    }
    return {"library, finest stage, seconds": library[0]["seconds"], **blocks}


def _layers(setting: Setting, part: str, reference: str) -> list[dict[str, Any]]:
    size = ["--scale", setting.pick("3", "1"), "--pairs", setting.pick("15", "1")]
    rows = setting.benchmark("layers", "--parts", part, *size, tiny={"STAGES": [(32, (4, 4, 4))]})
    assert any(row["variant"] == reference for row in rows), [row["variant"] for row in rows]
    return rows


@claim(
    "convolutions-price",
    "A training step of every weight-space prior costs what `nn.Conv` costs (geometric mean over a U-Net's "
    "stages); `transform` takes the faster of its two ways; `acs` beside three thin convolutions",
    Expect("dearest prior, times nn.Conv", most=1.05),
    Expect("transform, times the faster way", most=1.05),
    Expect("unfold and einsum, times transform", least=20),
    limit_s=240,
    no_limit="none: a ratio",
)
def convolutions_price(setting: Setting) -> Figures:
    words = ["--parts", "stages", "--device", setting.kind, "--pairs", setting.pick("10", "1")]
    rows = setting.benchmark("convs", *words, tiny={"STAGES": {3: [(8, (4, 4, 4))]}})
    step = [row for row in rows if "3D training step" in row["case"]]
    means = {row["variant"]: row["ratio"] for row in step if "mean" in row["case"]}
    stages = [row for row in step if "mean" not in row["case"]]
    ways: dict[str, dict[str, float]] = {}
    for row in stages:
        ways.setdefault(row["case"], {})[row["variant"]] = row["ratio"]
    both = ("transform, folded", "transform, two launches")
    wrong = [ratios["transform"] / min(ratios[way] for way in both) for ratios in ways.values()]
    priors = {name: means[name] for name in _PRIORS if name in means}
    return {
        "dearest prior, times nn.Conv": max(priors.values()),
        "transform, times the faster way": max(wrong),
        "unfold and einsum, times transform": means["unfold and einsum"] / means["transform"],
        "acs, three convolutions, times acs": means["acs, three convolutions"] / means["acs"],
        **{f"{name}, times nn.Conv": ratio for name, ratio in means.items()},
    }


@claim(
    "small-layers",
    "Chains of thin layers, measured and by the cost model, and with CUDA graphs; the backward pass in one "
    "call (`benchmark.py convs --parts small backward`)",
    Expect("one call, times the library's backward", most=1.1),
    limit_s=120,
    no_limit="none: a ratio",
)
def small_layers(setting: Setting) -> Figures:
    words = ["--device", setting.kind, "--pairs", setting.pick("20", "1")]
    rows = setting.benchmark("convs", "--parts", *setting.pick(["small", "backward"], ["backward"]), *words)
    ours = [row["ratio"] for row in rows if row["variant"] == "one call (ours)"]
    chains = {f"{row['case']}, {row['variant']}": row["ratio"] for row in rows if row["benchmark"] == "small"}
    return {"one call, times the library's backward": max(ours), **chains}


@claim(
    "group-norm",
    "SegResNet's training step at 128x128x128 in channels-last, with group norms by Triton, beside the "
    "contiguous format, with torch's",
    Expect("channels-last, times contiguous", most=1),
    limit_s=90,
    no_limit="none: a ratio",
)
def group_norm(setting: Setting) -> Figures:
    device = setting.device
    times: dict[bool, float] = {}
    for channels_last in (True, False):
        network = SegResNet(3, setting.pick(16, 8), in_channels=1, out_channels=3).to(device)
        apply_switches(network, channels_last=channels_last, fast_norm=channels_last)
        patch = [setting.pick(128, 16)] * 3
        image = to_memory_format(torch.randn(2, 1, *patch, device=device), memory_format(channels_last, 3))

        def step(network: Any = network, image: torch.Tensor = image) -> None:
            network.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                outputs = network(image)
            outputs.float().square().mean().backward()

        times[channels_last] = seconds(step, device, rounds=setting.pick(5, 1), warm_up=setting.pick(5, 1))
    return {
        "channels-last, times contiguous": times[True] / times[False],
        "contiguous, seconds": times[False],
    }


@claim(
    "wide-convolutions",
    "Thin convolutions as wide ones: 1, 2 and 4 outputs along the last axis at once; w=1 is `nn.Conv3d`",
    Expect("32 to 32 at 128, best width, times the plain speed", least=1.3),
    Expect("error", most=0.02, tiny=True),
    limit_s=60,
    no_limit="none: a ratio",
)
def wide_convolutions(setting: Setting) -> Figures:
    """Forward alone, and with both gradients, in bf16; a batch of 4, channels-last."""
    device, rounds = setting.device, setting.pick(3, 1)
    torch.backends.cudnn.benchmark = True
    figures: dict[str, Any] = {}
    worst = 0.0
    for inputs, outputs, edge in _THIN:
        size = setting.pick(edge, 8)
        shape = (setting.pick(4, 1), inputs, size, size, size)
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        x = to_memory_format(x, torch.channels_last_3d).requires_grad_()
        weight = (torch.randn(outputs, inputs, 3, 3, 3, device=device) / (27 * inputs) ** 0.5).bfloat16()
        weight = weight.to(memory_format=torch.channels_last_3d).requires_grad_()
        times: dict[int, tuple[float, float]] = {}
        plain = F.conv3d(x, weight, padding=1).detach()
        for width in _WIDTHS:
            conv = partial(F.conv3d, padding=1) if width == 1 else partial(wide_conv3d, width=width)
            worst = max(worst, float((conv(x, weight).detach() - plain).abs().max() / plain.abs().max()))
            with torch.no_grad():
                forward = seconds(partial(conv, x, weight), device, rounds, warm_up=2)

            def step(conv: Any = conv, leaves: Any = (x, weight), grad: Tensor = plain) -> None:
                torch.autograd.grad(conv(*leaves), leaves, grad)

            times[width] = (forward, seconds(step, device, rounds, warm_up=2))
        name = f"{inputs} to {outputs} at {edge}"
        milliseconds = [f"w={width} {1e3 * a:.2f} and {1e3 * b:.2f}" for width, (a, b) in times.items()]
        figures[f"{name}, ms of a forward pass and of all three"] = ", ".join(milliseconds)
        best = min(times[width][1] for width in _WIDTHS[1:])
        figures[f"{name}, best width, times the plain speed"] = times[1][1] / best
    return {**figures, "error": worst}
