"""How fast a step and its parts are, beside their peers and the hardware's limit."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch._dynamo.utils import counters

from gpu_checks import traces
from gpu_checks.claims import Expect, Figures, claim
from gpu_checks.limits import Peaks, newton_schulz_seconds, peaks_of
from gpu_checks.networks import (
    ADAMW,
    FAST,
    HIPPOCAMPUS,
    LARGE_PATCHES,
    NVIDIA,
    TINY,
    Size,
    seconds,
    trial,
    wait,
)
from gpu_checks.setting import Setting, in_own_process
from medconv.performance.switches import apply_switches
from medconv.training.optim.muon import Muon

# Images a second that plausible efficiencies give layer by layer on an H100, 75 if all goes well. The aim is
# 100, which needs the layers of 32 channels at 45 % of the peak.
_EXPECTED = 60


def _images_limit(peaks: Peaks) -> float:
    return NVIDIA.batch / NVIDIA.limit_seconds(peaks)


def _share_limit(peaks: Peaks) -> float:
    return NVIDIA.operations / NVIDIA.limit_seconds(peaks) / peaks.bf16


def _throughput(setting: Setting, **switches: Any) -> Figures:
    """At NVIDIA's size. The peak's share counts the convolutions' operations alone."""
    device, size = setting.device, setting.pick(NVIDIA, TINY)
    torch.backends.cudnn.benchmark = True
    operations = size.operations  # counted in a forked process, so before CUDA begins in this one
    measured = trial(size, FAST, device)
    if switches:
        apply_switches(measured.network, channels_last=True, **switches)
    step = seconds(measured.step, device, rounds=setting.pick(5, 1), warm_up=setting.pick(10, 2))
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    return {
        "images/s": size.batch / step,
        "share of the bf16 peak": operations / step / peaks_of(name).bf16,
        "seconds a step": step,
        "peak GB": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "where": traces.dearest(measured.step, number=25),
        # of the step as CUDA graphs: why none was recorded; without, the graphs gained nothing
        "graphs that were skipped": counters["inductor"]["cudagraph_skips"],
    }


@claim(
    "images-per-second",
    "Training step of a 3D U-Net at NVIDIA's size: 128x128x128, 4 channels, batch 4; 29.96 on an A100; the "
    "aim is 100",
    Expect("images/s", least=_EXPECTED, limit=_images_limit),
    Expect("share of the bf16 peak", limit=_share_limit),
    limit_s=90,
)
def images_per_second(setting: Setting) -> Figures:
    return _throughput(setting)


@claim(
    "images-compiled",
    "The same step compiled",
    Expect("images/s", least=_EXPECTED, limit=_images_limit),
    limit_s=180,
)
def images_compiled(setting: Setting) -> Figures:
    return _throughput(setting, **setting.pick({"compile": True}, {}))


@claim(
    "images-cuda-graphs",
    "The same step compiled, with CUDA graphs",
    Expect("images/s", least=_EXPECTED, limit=_images_limit),
    limit_s=180,
)
def images_cuda_graphs(setting: Setting) -> Figures:
    return _throughput(setting, **setting.pick({"compile": True, "cuda_graphs": True}, {}))


@claim(
    "tuning",
    "cuDNN's search for the fastest algorithm: seconds until the first steps of four sizes, and of a step",
    Expect("limit 3, seconds a step, times limit 10", most=1.05),
    limit_s=150,
    no_limit="none: a ratio",
)
def tuning(setting: Setting) -> Figures:
    """`cudnn.benchmark` off, 3 algorithms tried, and torch's 10, for each size of a patch.

    Each in a process of its own: torch keeps what it found for a size, whatever it was found by.
    """
    figures: dict[str, Any] = {}
    for name, on, limit in (("off", False, 10), ("limit 3", True, 3), ("limit 10", True, 10)):
        found = in_own_process(f"tuning, {name}", partial(_tuned, setting, on, limit))
        figures |= {f"{name}, {key}": value for key, value in found.items()}
    ratio = figures["limit 3, seconds a step"] / figures["limit 10, seconds a step"]
    return figures | {"limit 3, seconds a step, times limit 10": ratio}


def _tuned(setting: Setting, on: bool, limit: int) -> dict[str, float]:
    """Seconds of the first steps of all sizes, and of a later step of the last one."""
    device = setting.device
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = on, limit
    spent = step = 0.0
    for edge in setting.pick((32, 64, 96, 128), (8, 16)):
        size = replace(setting.pick(NVIDIA, TINY), patch=(edge, edge, edge), batch=2)
        measured = trial(size, FAST, device)
        start = time.perf_counter()
        measured.step()
        wait(device)
        spent += time.perf_counter() - start
        step = seconds(measured.step, device, setting.pick(3, 1), warm_up=2)
        del measured
    return {"seconds of the first steps": spent, "seconds a step": step}


def _step_table(setting: Setting, size: Size, *words: str) -> Figures:
    size = setting.pick(size, TINY)
    rounds = ["--pairs", setting.pick("3", "1")]
    peers = ["--peers", *setting.pick(["dynunet"], [])]
    rows = setting.benchmark("step", *size.words(), *rounds, *peers, *words)
    found = {row["variant"]: row for row in rows}
    fast, slow = found["perf=fast"], found.get("MONAI DynUNet, plain Lightning")
    own = found.get("peers' network, perf=fast")
    figures: dict[str, Any] = {
        "perf=fast, seconds": fast["seconds"],
        "times perf=reference": fast["times_as_fast"],
    }
    if slow and own:
        figures["times DynUNet in plain Lightning"] = slow["seconds"] / own["seconds"]
    figures |= {f"{name}, times perf=reference": row["times_as_fast"] for name, row in found.items()}
    return figures | {"autotune chose": found["perf=autotune"]["choice"]}


@claim(
    "step-small",
    "The table of the step at 40x56x40, every switch alone, MONAI's DynUNet beside (`benchmark.py step`)",
    Expect("perf=fast, seconds", limit=HIPPOCAMPUS.limit_seconds),
    Expect("times perf=reference", least=1.5),
    Expect("times DynUNet in plain Lightning", least=1.5),
    limit_s=150,
)
def step_small(setting: Setting) -> Figures:
    return _step_table(setting, HIPPOCAMPUS)


@claim(
    "step-large",
    "The same table at NVIDIA's size",
    Expect("perf=fast, seconds", limit=NVIDIA.limit_seconds),
    Expect("times perf=reference", least=2),
    Expect("times DynUNet in plain Lightning", least=2),
    limit_s=240,
)
def step_large(setting: Setting) -> Figures:
    return _step_table(setting, NVIDIA)


def _matrices() -> list[tuple[int, int]]:
    with torch.device("meta"):
        kernels = [p for p in NVIDIA.unet().parameters() if p.ndim > 2]
    return [(len(kernel), prod(kernel.shape[1:])) for kernel in kernels]


@claim(
    "muon-share",
    "Muon's share of a step at NVIDIA's size, beside fused AdamW's",
    Expect("Muon, seconds", limit=lambda peaks: newton_schulz_seconds(peaks, _matrices())),
    Expect("Muon, more than AdamW, share of the step", most=0.15),
    limit_s=70,
)
def muon_share(setting: Setting) -> Figures:
    """By the difference of whole steps: an optimizer alone waits for the host, which runs ahead in a step."""
    device, size = setting.device, setting.pick(NVIDIA, TINY)
    figures: dict[str, Any] = {}
    for name, optimizer in (("AdamW", ADAMW), ("Muon", partial(Muon, lr=1e-3))):
        measured = trial(size, FAST, device, optimizer)
        # as in training, where the device skips a step with gradients that are not finite
        measured.optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        measured.optimizer.grad_scale = None  # type: ignore[attr-defined]
        figures[f"{name}, step"] = seconds(measured.step, device, rounds=setting.pick(5, 1), warm_up=5)
        wait(device)  # the last gradients stay, so that the optimizer alone can be timed
        alone = seconds(measured.optimizer.step, device, rounds=setting.pick(5, 1), warm_up=3)
        figures |= {f"{name}, seconds": alone, f"{name}, where": traces.dearest(measured.optimizer.step)}
        del measured
    more = figures["Muon, step"] - figures["AdamW, step"]
    return figures | {"Muon, more than AdamW, share of the step": more / figures["Muon, step"]}


@claim(
    "deep-supervision",
    "Deep supervision's share of a training step at 128x128x128",
    Expect("seconds a sample, times without", most=1.1),
    limit_s=130,
    no_limit="none: a ratio",
)
def deep_supervision(setting: Setting) -> Figures:
    speed = {}
    for on in ("true", "false"):
        steps = [
            "schedule.patch=whole",
            "trainer.max_steps=40",
            "trainer.limit_val_batches=0",
            "data.samples_per_epoch=200",
        ]
        summary = setting.train(
            f"{on}", *LARGE_PATCHES, *steps, f"task.deep_supervision={on}", "augmentation=none"
        )
        speed[on] = summary["samples_per_second"]
    return {"seconds a sample, times without": speed["false"] / speed["true"], "samples/s": speed["true"]}


@claim(
    "fault-tolerance",
    "What surviving costs a step: gradient check, random numbers by number, checkpoints (`fault_tolerance`)",
    Expect("norm of the gradient, times a step", most=0.02),
    Expect("random numbers, times a step", most=0.02),
    limit_s=70,
    no_limit="none: a ratio",
)
def fault_tolerance(setting: Setting) -> Figures:
    size = setting.pick(
        ["--patch", "128", "128", "128"], ["--patch", "16", "16", "16", "--features", "4", "8"]
    )
    rows = setting.benchmark("fault_tolerance", *size, "--pairs", setting.pick("10", "1"))
    ratios = {row["variant"]: row["ratio"] for row in rows}
    return {
        "norm of the gradient, times a step": ratios["norm of the gradient, where it is not clipped"],
        "random numbers, times a step": ratios["random numbers by number"],
        **{f"{name}, times a step": ratio for name, ratio in ratios.items()},
    }


@claim(
    "guard-price",
    "The guard against gradients that are not finite, read one step late and at once (`late=False` waits)",
    Expect("late, times without", most=1.02),
    limit_s=60,
    no_limit="none: a ratio",
)
def guard_price(setting: Setting) -> Figures:
    """Without Lightning: the norm's check, left to the device and read by the host."""
    device, size = setting.device, setting.pick(replace(NVIDIA, batch=2), TINY)
    measured = trial(size, FAST, device)
    optimizer: Any = measured.optimizer

    def late() -> None:
        measured.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in measured.parameters if p.grad is not None])
        optimizer.grad_scale, optimizer.found_inf = None, (~norm.isfinite()).float()

    def at_once() -> None:
        measured.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in measured.parameters if p.grad is not None])
        bool(norm.isfinite())

    rounds = setting.pick(5, 1)
    plain = seconds(measured.step, device, rounds)
    waits = seconds(at_once, device, rounds)
    return {
        "late, times without": seconds(late, device, rounds) / plain,
        "at once, times without": waits / plain,
    }


@claim(
    "muon-dice",
    "Muon against AdamW after a minute of training on the phantoms",
    Expect("Muon's Dice less AdamW's", least=-0.005),
    limit_s=200,
    no_limit="none: a Dice",
)
def muon_dice(setting: Setting) -> Figures:
    dice = {}
    for name in ("muon", "adamw"):
        settings = [f"optimizer={name}", "trainer.max_time=00:00:01:00", "data.samples_per_epoch=800"]
        dice[name] = setting.train(name, *settings)["val/dice"]
    return {"Muon's Dice less AdamW's": dice["muon"] - dice["adamw"], **dice}
