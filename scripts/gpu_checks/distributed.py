"""Several devices: what one GPU can show, and what needs two, or two machines."""

from __future__ import annotations

import json

import torch

from gpu_checks.claims import Expect, Figures, Skip, claim
from gpu_checks.limits import Peaks
from gpu_checks.networks import PHANTOM
from gpu_checks.setting import Setting
from gpu_checks.smoke import losses


def _need_two(setting: Setting, command: str) -> None:
    """Raises: Skip: this machine has one GPU. Counted without beginning CUDA, which forks do not survive."""
    count = torch.cuda.device_count() if setting.kind == "cuda" else 0
    if count < 2:
        raise Skip(f"needs two GPUs, this machine has {count}: {command}")


def _one(setting: Setting, strategy: str) -> Figures:
    """Against a training without a strategy: the same losses."""
    same = ["trainer.precision=32-true", "trainer.max_steps=10", "weight_averaging=none", "augmentation=none"]
    setting.train("plain", *same)
    summary = setting.train(strategy, *same, f"trainer.strategy={strategy}")
    plain, other = losses(setting, "plain"), losses(setting, strategy)
    difference = max(abs(other[step] / plain[step] - 1) for step in plain)
    return {"done": summary["status"] == "done", "largest difference of a loss": difference}


@claim(
    "nccl-one",
    "DDP with one process and NCCL gives the losses of a training without it",
    Expect("done", least=1, tiny=True),
    Expect("largest difference of a loss", most=2e-2, tiny=True),
    limit_s=70,
)
def nccl_one(setting: Setting) -> Figures:
    return _one(setting, "ddp")


@claim(
    "fsdp-one",
    "FSDP2 with one process gives the losses of a training without it",
    Expect("done", least=1, tiny=True),
    Expect("largest difference of a loss", most=2e-2, tiny=True),
    limit_s=80,
)
def fsdp_one(setting: Setting) -> Figures:
    return _one(setting, "fsdp")


@claim(
    "ddp-two",
    "Two GPUs by DDP with `trainer.sync_batchnorm=true` equal one with twice the batch",
    Expect("largest difference of a loss", most=5e-2),
    limit_s=120,
)
def ddp_two(setting: Setting) -> Figures:
    _need_two(setting, "trainer.devices=2 trainer.strategy=ddp trainer.sync_batchnorm=true")
    same = ["trainer.precision=32-true", "trainer.max_steps=10", "model.norm=batch", "augmentation=none"]
    setting.train("one", *same, "data.batch_size=4")
    two = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.sync_batchnorm=true", "data.batch_size=2"]
    setting.train("two", *same, *two)
    one, both = losses(setting, "one"), losses(setting, "two")
    return {"largest difference of a loss": max(abs(both[step] / one[step] - 1) for step in one)}


def _exchange_seconds(peaks: Peaks) -> float:
    """An fp32 number of each parameter once over the link."""
    with torch.device("meta"):
        return sum(4 * p.numel() for p in PHANTOM.unet().parameters()) / peaks.peer


def _efficiency_limit(peaks: Peaks) -> float:
    """The step hides the exchange of gradients; 1 if the step takes longer."""
    return min(1.0, PHANTOM.limit_seconds(peaks) / _exchange_seconds(peaks))


def _fsdp_limit(peaks: Peaks) -> float:
    """Each GPU gathers the half of the weights that it lacks, forward and backward, and sends half of the
    gradients: 1.5 times the parameters, hidden by a step that takes longer.
    """
    return 2 * PHANTOM.batch / max(PHANTOM.limit_seconds(peaks), 1.5 * _exchange_seconds(peaks))


@claim(
    "fsdp-two",
    "Two GPUs by FSDP2",
    Expect("done", least=1),
    Expect("samples/s", limit=_fsdp_limit),
    limit_s=100,
)
def fsdp_two(setting: Setting) -> Figures:
    _need_two(setting, "trainer.devices=2 trainer.strategy=fsdp")
    words = ["trainer.devices=2", "trainer.strategy=fsdp", "weight_averaging=none", "trainer.max_steps=20"]
    summary = setting.train("run", *words)
    return {"done": summary["status"] == "done", "samples/s": summary["samples_per_second"]}


@claim(
    "scaling",
    "Two GPUs train nearly twice as many samples a second as one (`benchmark.py scaling`)",
    Expect("efficiency", least=0.9, limit=_efficiency_limit),
    limit_s=240,
)
def scaling(setting: Setting) -> Figures:
    _need_two(setting, "python scripts/benchmark.py scaling")
    rows = setting.benchmark("scaling", "--pairs", "2", "--overrides", *setting.overrides("scaling")[2:4])
    return {
        "efficiency": rows[-1]["efficiency"],
        "samples/s": json.dumps([r["samples_per_second"] for r in rows]),
    }


@claim(
    "tensor-parallel",
    "Model-parallel convolutions with NCCL, and `pair` on the coarse stages against DDP and FSDP2",
    limit_s=20,
    no_limit="none: tests measure it, not this command",
)
def tensor_parallel(setting: Setting) -> Figures:
    raise Skip("needs two GPUs and pytest: pytest tests/features/tensor_parallel/test_shard.py with NCCL")


@claim(
    "lost-machine",
    "A machine that is lost, with NCCL: seconds until the others end, their exit code 75 and one line, or "
    "134 of the watchdog; `scripts/slurm/train.sbatch`: 75 for both, SIGUSR1 before the time limit, "
    "requeue, `--wait=120`",
    limit_s=20,
    no_limit="none: seconds of a timeout",
)
def lost_machine(setting: Setting) -> Figures:
    raise Skip("needs two machines under Slurm: srun train.py perf.timeout_seconds=60, then SIGKILL, SIGSTOP")
