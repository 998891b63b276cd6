"""What runs on CUDA gives the numbers of the CPU, and of itself when it is run again."""

from __future__ import annotations

import sys
import traceback
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_checks import norm, traces
from gpu_checks.claims import Expect, Figures, claim
from gpu_checks.setting import Setting
from gpu_checks.smoke import losses
from medconv.convs import fold_convs
from medconv.convs.parametrization import CHANNELS_LAST
from medconv.data.augmentation.augment import Augment
from medconv.data.augmentation.parameters import INTENSITY, SPATIAL
from medconv.training.optim.muon import Muon

_TESTS = Path(__file__).parents[2] / "tests"
_BASIC_UNET = """\
_target_: monai.networks.nets.BasicUNet
spatial_dims: ${derived.spatial_dims}
in_channels: ${derived.num_channels}
out_channels: ${derived.num_classes}
features: [16, 16, 32, 32, 32, 16]
norm: batch
"""


@claim(
    "norms",
    "Instance and batch norm by Triton equal torch's in double precision, forward and backward, and instance "
    "norm without Triton",
    Expect("error in float32", most=1e-3, tiny=True),
    Expect("error in bfloat16", most=1e-2, tiny=True),
    Expect("error in float16", most=3e-3),
    Expect("error without Triton", most=1e-4, tiny=True),
    limit_s=70,
)
def norms(setting: Setting) -> Figures:
    return norm.interpreted() if setting.kind == "cpu" else norm.errors(setting.device, setting.tiny)


@claim(
    "convolutions",
    "Every convolution equals itself on the CPU: fp32, autocast to fp16 and bf16, channels-last, folded, "
    "compiled as one graph",
    Expect("error in fp32", most=1e-3, tiny=True),
    Expect("error in half precision", most=5e-2, tiny=True),
    Expect("convolutions", least=10, tiny=True),
    limit_s=100,
)
def convolutions(setting: Setting) -> Figures:
    device = setting.device
    torch.backends.cudnn.allow_tf32 = False
    sys.path.append(str(_TESTS))
    from helpers.conv_family import CASES, build, image

    worst, failed = {"error in fp32": 0.0, "error in half precision": 0.0}, []
    for name, dims in CASES:
        print(name, dims, flush=True)
        try:
            for key, error in _convolution(build(name, dims), image(dims), device).items():
                worst[key] = max(worst[key], error)
        except Exception:
            failed.append(f"conv={name}, {dims}D:\n{traceback.format_exc()}")
    if failed:
        raise RuntimeError("\n".join(failed))
    return {**worst, "convolutions": len(CASES)}


def _convolution(module: nn.Module, x: Tensor, device: torch.device) -> dict[str, float]:
    expected = _with_gradients(module, x)
    there, layout = deepcopy(module).to(device), CHANNELS_LAST[x.ndim]
    fp32 = [_error(_with_gradients(there, x.to(device)), expected)]
    fp32.append(_error([fold_convs(there)(x.to(device))], expected[:1]))
    compiled: Any = torch.compile(deepcopy(there), backend="aot_eager", fullgraph=True)
    fp32.append(_error(_with_gradients(compiled, x.to(device)), expected))
    torch.compiler.reset()
    for layer in there.modules():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
            layer.to(memory_format=layout)  # type: ignore[call-overload]
    last = x.to(device).contiguous(memory_format=layout)
    fp32.append(_error(_with_gradients(there, last), expected))
    half = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype):
            half.append(_error(_with_gradients(there, last)[:1], expected[:1]))
    return {"error in fp32": max(fp32), "error in half precision": max(half)}


def _with_gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), list(module.parameters()))]


def _error(outputs: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(outputs, expected, strict=True)
    return max(float((a.float().cpu() - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)


@claim(
    "augmentation",
    "Augmentation on the device equals that of the workers, but for the noise, which another generator draws",
    Expect("largest difference", most=2e-2, tiny=True),
    Expect("labels that differ", most=1e-3, tiny=True),
    limit_s=40,
)
def augmentation(setting: Setting) -> Figures:
    device, size = setting.device, setting.pick((48, 40, 32), (14, 12, 10))
    chances = {**dict.fromkeys((*SPATIAL, *INTENSITY), 0.5), "noise": 0.0}
    moves: dict[str, Any] = {"rotation_deg": 20, "scale": (0.8, 1.25), "shift": 0.1, "elastic_mm": 2}
    augment = Augment(3, (1, 1.5, 2), size, p=chances, **moves, elastic_spacing_mm=8)
    shape = [n + 6 for n in size]
    batch = {
        "image": torch.randn(16, 2, *shape),
        "label": torch.randint(0, 4, (16, 1, *shape)).to(torch.uint8),
    }
    here, there = (augment({**batch, "sample": torch.arange(16)}) for _ in range(2))
    there = augment({**{k: v.to(device) for k, v in batch.items()}, "sample": torch.arange(16)})
    return {
        "largest difference": (there["image"].cpu() - here["image"]).abs().max(),
        "labels that differ": (there["label"].cpu() != here["label"]).float().mean(),
    }


@claim(
    "muon",
    "A step of Muon equals that of the CPU, and `found_inf` on the device keeps the weights as they are",
    Expect("error", most=0.1, tiny=True),
    Expect("change of a skipped step", most=0, tiny=True),
    limit_s=30,
)
def muon(setting: Setting) -> Figures:
    network = nn.Sequential(*(nn.Conv3d(a, b, 3) for a, b in ((4, 32), (32, 64), (64, 64), (64, 16))))
    gradients = [torch.randn_like(parameter) for parameter in network.parameters()]
    after, before = {}, [p.detach().clone() for p in network.parameters()]
    for device in (torch.device("cpu"), setting.device):
        copy = deepcopy(network).to(device)
        optimizer = Muon(copy.parameters(), lr=1.0, weight_decay=0.0)
        for skipped in (0.0, 1.0):
            for parameter, gradient in zip(copy.parameters(), gradients, strict=True):
                parameter.grad = gradient.to(device)
            optimizer.found_inf = torch.tensor(skipped, device=device)  # type: ignore[attr-defined]
            weights = [parameter.detach().clone() for parameter in copy.parameters()]
            optimizer.step()
        after[device.type] = [p.detach().cpu() for p in copy.parameters()]
        pairs = zip(copy.parameters(), weights, strict=True)
        change = max(float((p.detach() - w).abs().max()) for p, w in pairs)
    both = zip(after["cpu"], after[setting.kind], before, strict=True)
    return {
        "error": max(float((a - b).norm() / (a - start).norm()) for a, b, start in both),
        "change of a skipped step": change,
    }


@claim(
    "deterministic",
    "`trainer.deterministic=true` twice gives the same losses, with our network and with MONAI's BasicUNet",
    Expect("difference, customconv", most=0, tiny=True),
    Expect("difference, BasicUNet", most=0, tiny=True),
    limit_s=100,
)
def deterministic(setting: Setting) -> Figures:
    option = setting.folder / "options/model/basicunet.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(_BASIC_UNET)
    models = {"customconv": [], "BasicUNet": [f"--config-dir={option.parents[1]}", "model=basicunet"]}
    found = {}
    for name, words in models.items():
        same = [*words, "trainer.deterministic=true", "trainer.max_steps=15", "data.patch_size=[32,32,32]"]
        runs = [f"{name}-{number}" for number in range(2)]
        for run in runs:
            setting.train(run, *same)
        first, second = (losses(setting, run) for run in runs)
        found[f"difference, {name}"] = max(abs(first[step] - second[step]) for step in first)
    return found


@claim(
    "same-as-cpu",
    "The losses of the first steps in plain fp32 are those of the CPU",
    Expect("largest difference", most=1e-2, tiny=True),
    limit_s=60,
)
def same_as_cpu(setting: Setting) -> Figures:
    sizes = ["data.patch_size=[32,32,32]", "data.batch_size=2", "plan.channels=[8,16,32]"]
    plain = ["perf=reference", "augmentation=none", "conv=transform", "trainer.max_steps=6", *sizes]
    setting.train("there", *plain, "plan.strides=[[2,2,2],[2,2,2]]")
    setting.train("here", *plain, "plan.strides=[[2,2,2],[2,2,2]]", "trainer.accelerator=cpu")
    here, there = losses(setting, "here"), losses(setting, "there")
    return {"largest difference": max(abs(there[step] / here[step] - 1) for step in here)}


@claim(
    "fp16-loss",
    "fp16 with loss scaling reaches the loss of fp32 after 200 steps, within 3 %",
    Expect("difference", most=0.03),
    limit_s=90,
)
def fp16_loss(setting: Setting) -> Figures:
    half = "16-mixed" if setting.kind == "cuda" else "bf16-mixed"
    reached = {}
    for precision in ("32-true", half):
        settings = ["trainer.max_steps=200", "trainer.limit_val_batches=0", f"trainer.precision={precision}"]
        setting.train(precision, *settings)
        last = list(losses(setting, precision).values())[-20:]
        reached[precision] = sum(last) / len(last)
    return {"difference": abs(reached[half] / reached["32-true"] - 1), **reached}


@claim(
    "nonfinite",
    "A batch that is not finite is skipped in bf16, fp16 and fp32; the run goes on, its weights are finite",
    Expect("skipped steps, fewest", least=1, tiny=True),
    Expect("skipped steps, most", most=1, tiny=True),
    Expect("weights that are not finite", most=0, tiny=True),
    limit_s=90,
)
def nonfinite(setting: Setting) -> Figures:
    precisions = ["bf16-mixed", "16-mixed", "32-true"] if setting.kind == "cuda" else ["32-true"]
    skipped, bad = [], 0
    for precision in precisions:
        poison = "+callbacks.poison={_target_:gpu_checks.poison.Poison,step:2}"
        settings = [f"trainer.precision={precision}", "run.nan_policy=skip", "trainer.max_steps=12", poison]
        setting.train(precision, *settings, tiny=["trainer.max_steps=4"])
        skipped.append((setting.folder / precision / "train.log").read_text().count("skipped (1 of at most"))
        file = setting.folder / precision / "checkpoints/last.ckpt"
        weights = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
        bad += sum(int((~w.isfinite()).sum()) for w in weights.values())
    return {
        "skipped steps, fewest": min(skipped),
        "skipped steps, most": max(skipped),
        "weights that are not finite": bad,
    }


@claim(
    "no-waits",
    "No step waits for the device (`cudaStreamSynchronize` in a trace); the step profiler's shares add up",
    Expect("waits in a step", most=0),
    Expect("sum of the shares", least=0.98, most=1.02, tiny=True),
    Expect("steps in the trace", least=3, tiny=True),
    limit_s=70,
)
def no_waits(setting: Setting) -> Figures:
    # cuDNN waits while it tries its algorithms on patches of a new size
    settings = ["perf.profile=true", "trainer.max_steps=30", "trainer.log_every_n_steps=1000"]
    settings += ["schedule.patch=whole"]
    summary = setting.train("run", *settings, "data.samples_per_epoch=400", tiny=["trainer.max_steps=14"])
    waits = traces.waits(setting.folder / "run/tensorboard/trace")
    return {**waits, "sum of the shares": sum(summary["step_shares"].values()), **summary["step_shares"]}
