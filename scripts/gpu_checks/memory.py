"""The plan's estimate of memory against what a step takes, and what happens at the limit."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from benchmarks.memory import step_memory
from gpu_checks.claims import Expect, Figures, claim
from gpu_checks.networks import FAST, NVIDIA, TINY, Size, trial
from gpu_checks.setting import Setting
from medconv.inference.sliding_window import SlidingWindow
from medconv.planning.topology import Budget, Network, step_bytes

_CHOICES = {
    "fp32": replace(FAST, precision="32-true"),
    "bf16": FAST,
    "bf16, pointwise": replace(FAST, activation_checkpointing="pointwise"),
    "bf16, blocks": replace(FAST, activation_checkpointing="blocks"),
}


@claim(
    "memory-estimate",
    "The plan's estimate of a step's memory at 128x128x128, batch 2, is within 20 % of the allocator's peak",
    Expect("furthest ratio of peak to estimate", most=1.2),
    Expect("nearest to nothing", least=0.8),
    limit_s=60,
    no_limit="none: a ratio",
)
def memory_estimate(setting: Setting) -> Figures:
    device, size = setting.device, setting.pick(replace(NVIDIA, batch=2), TINY)
    figures: dict[str, float] = {}
    choices = dict(list(_CHOICES.items())[:: setting.pick(1, 2)])
    for name, choice in choices.items():
        measured = trial(size, choice, device)
        measured.step()  # so that the optimizer has its states, which the estimate counts
        counted = step_memory(measured.forward, measured.step, device)["peak_bytes"]
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else counted + _held(measured)
        budget = Budget(1, "", choice.precision, choice.activation_checkpointing)
        figures[name] = peak / _estimate(size, budget)
        figures[f"{name}, GB"] = peak / 2**30
        del measured
    ratios = [figures[name] for name in choices]
    return {"furthest ratio of peak to estimate": max(ratios), "nearest to nothing": min(ratios), **figures}


def _held(measured: Any) -> int:
    """Bytes of weights, optimizer states and batch."""
    states = [
        v for state in measured.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
    ]
    return sum(t.nbytes for t in (*measured.parameters, *states, measured.image, measured.label))


def _estimate(size: Size, budget: Budget) -> float:
    dims, stages = len(size.patch), len(size.features)
    strides = ((1,) * dims, *((2,) * dims,) * (stages - 1))
    network = Network(strides[1:], ((3,) * dims,) * stages, size.features)
    return step_bytes(network, size.patch, size.batch, size.channels, size.classes, budget)


@claim(
    "plan-full",
    "Without a limit of time a plan is `full`, and steps whose patches fill the budget stay within it",
    Expect("size full", least=1),
    Expect("peak, times the budget", most=1.0),
    limit_s=120,
)
def plan_full(setting: Setting) -> Figures:
    # So fine that a patch is a part of the image. Of one size, as cuDNN tries its algorithms for each.
    words = ["data.spacing_mm=[0.25,0.25,0.25]", "schedule.patch=whole", "trainer.max_steps=12"]
    summary = setting.train("run", *words)
    derived = OmegaConf.load(setting.folder / "run" / "config.yaml").derived
    peak_gb = summary["peak_memory_bytes"] / 2**30
    return {
        "size full": derived.size == "full",
        "peak, times the budget": peak_gb / derived.memory_gb,
        "budget, GB": derived.memory_gb,
        "patch, voxels": prod(derived.patch_size),
        "samples/s": summary["samples_per_second"],
    }


@claim(
    "autotune",
    "`perf=autotune` with a batch of 64 ends with switches that fit into memory",
    Expect("done", least=1, tiny=True),
    limit_s=120,
)
def autotune(setting: Setting) -> Figures:
    settings = ["perf=autotune", "data.batch_size=64", "trainer.max_steps=20", "data.samples_per_epoch=1280"]
    summary = setting.train("run", *settings, f"perf.auto_seconds={setting.pick(30, 2)}")
    return {"done": summary["status"] == "done", "peak GB": summary["peak_memory_bytes"] / 2**30}


@claim(
    "auto-batch-size",
    "`perf.auto_batch_size=true` finds a batch that trains",
    Expect("done", least=1, tiny=True),
    limit_s=100,
)
def auto_batch_size(setting: Setting) -> Figures:
    settings = ["perf=autotune", "perf.auto_batch_size=true", "trainer.max_steps=20"]
    summary = setting.train("run", *settings, f"perf.auto_seconds={setting.pick(20, 2)}")
    return {"done": summary["status"] == "done", "samples/s": summary["samples_per_second"]}


@claim(
    "full-gpu",
    "A volume whose logits do not fit into GPU memory is summed on the CPU, with the same result",
    Expect("largest difference", most=1e-3, tiny=True),
    Expect("summed on the CPU", least=1),
    limit_s=80,
)
def full_gpu(setting: Setting) -> Figures:
    device, classes = setting.device, setting.pick(8, 2)
    network = torch.nn.Conv3d(1, classes, 3, padding=1).to(device)
    window = SlidingWindow((setting.pick(96, 8),) * 3)
    image = torch.randn(1, 1, *(setting.pick(320, 16),) * 3, device=device)
    with torch.inference_mode():
        whole = window(network, image)
        where, expected = whole.device.type, whole.cpu()
        if device.type == "cuda":
            del whole
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            # the logits, 8 bytes a voxel and class with their weights, do not fit; the image and windows do
            share = (torch.cuda.memory_reserved() + expected.nbytes * 0.8) / total
            torch.cuda.set_per_process_memory_fraction(share)
            whole = window(network, image)
            where = whole.device.type
    difference = (whole.cpu() - expected).abs().max()
    return {"largest difference": difference, "summed on the CPU": where == "cpu"}
