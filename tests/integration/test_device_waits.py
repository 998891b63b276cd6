"""No training step waits for its device, and no part of one mixes devices: shown without a GPU.

Parts run on torch's `meta`. A tensor there has a shape and no values, so that asking for a value or for a shape
that depends on values is an error. A copy from the CPU must go through `to_device`, which pins the memory first.
A whole training, with Lightning and all callbacks, runs on the CPU: who asks tensors for values is noted.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import conv_family, tiny
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medconv.data.augmentation.augment import Augment
from medconv.data.augmentation.parameters import INTENSITY, SPATIAL
from medconv.data.loading.datamodule import DataModule
from medconv.features.image_level.mixup import Mixup
from medconv.models import UNet
from medconv.models.deep_supervision import DeepSupervision
from medconv.targets.label_map import LabelMapTargets
from medconv.training.callbacks import weight_averaging
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.checkpoint.resumable_loop import ResumableEpochLoop
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy
from medconv.training.optim import muon
from medconv.training.optim.muon import Muon
from medconv.training.task import _with_nan_gradient_if_bad

META = torch.device("meta")


class Watch(TorchDispatchMode):
    """Raises AssertionError: a copy to the device outside `to_device`, or a tensor of the CPU among its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in tensors if t.is_meta]
        ours = [t for t in tensors if not t.is_meta and t.ndim]
        target = kwargs.get("device")
        if ours and (there or (target is not None and torch.device(target) == META)):
            assert func._overloadpacket.__name__ in ("_to_copy", "copy_"), f"{func} mixes devices"
            assert _called_from("to_device"), f"{func} copies from memory that is not pinned"
        return func(*args, **kwargs)


def _called_from(name):
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def step(norm):
    targets = LabelMapTargets(("a", "b"), ((1,), (2,)))
    network = UNet(3, 1, 3, (4, 6, 8), (2, 2), norm=norm).to(META)
    heads = DeepSupervision(network, 2).to(META)
    loss = FittedLoss(DiceCrossEntropy(class_weights=(1.0, 2.0, 1.0)), targets, 3).to(META)
    parameters = [*network.parameters(), *heads.parameters()]
    optimizer = Muon(parameters)
    with Watch():
        for _ in range(2):
            optimizer.zero_grad()
            image = torch.empty(2, 1, 8, 8, 8, device=META)
            label = torch.zeros(2, 1, 8, 8, 8, device=META, dtype=torch.uint8)
            _with_nan_gradient_if_bad(loss(heads(network, image), targets.encode(label))).backward()
            trained = [p for p in parameters if p.grad is not None]
            total = get_total_norm([p.grad for p in trained if p.grad is not None])
            clip_grads_with_norm_(trained, 12.0, total)
            optimizer.found_inf = (~total.isfinite()).float()
            optimizer.step()


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_a_step_does_not_wait(norm):
    step(norm)


@pytest.mark.parametrize("name", conv_family.ALL)
def test_a_convolution_does_not_wait(name, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none on meta
    module = conv_family.build(name, 3).to(META)
    with Watch():
        output = module(torch.empty(conv_family.image(3).shape, device=META))
        torch.autograd.grad(output.float().square().sum(), list(module.parameters()))


def test_mixup_does_not_wait():
    image, target = torch.empty(8, 2, 9, 9, device=META), torch.empty(8, 3, device=META)
    with Watch():
        Mixup(0.3, 1)(image, target, list(range(8)))


@pytest.mark.parametrize("dims", [2, 3])
def test_augmentation_does_not_wait(dims, monkeypatch):
    """Without noise, as meta draws no random numbers."""
    real = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: real())
    chances, size = {**dict.fromkeys((*SPATIAL, *INTENSITY), 0.5), "noise": 0.0}, (14, 12, 10)[:dims]
    pairs = {"flip_label_pairs": [[1, 2]], "left_right_axis": 0, "mirror_axes": "all"}
    augment = Augment(3, (1, 1.5, 2)[:dims], size, p=chances, elastic_mm=2, elastic_spacing_mm=8, **pairs)
    image = torch.empty(8, 2, *(n + 4 for n in size), device=META)
    label = torch.zeros(8, 1, *image.shape[2:], device=META, dtype=torch.uint8)
    with Watch():
        augment({"image": image, "label": label, "sample": torch.arange(8)})


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(4).to(META),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: x + torch.ones(4),
    ],
)
def test_a_wait_is_seen(waits):
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), Watch():
        waits(torch.empty(4, device=META))


class Values(TorchFunctionMode):
    """Notes the functions, ours or Lightning's, that ask tensors for values."""

    ASKING = ("item", "cpu", "numpy", "tolist", "nonzero", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.asked = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype is torch.bool
        if masked or getattr(func, "__name__", "") in self.ASKING:
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            self.asked.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
        return func(*args, **(kwargs or {}))


ON_HOST = {  # asked of tensors on the host, or once they have come there
    ("hardware.py", "__bool__"),  # whether the step before was finite
    ("weight_averaging.py", "update_parameters"),  # the number of updates
    ("augment.py", "__call__"),
    # parameters of augmentations; what these do to images is tested above
    *(("augment.py", name) for name in ("_move", "_index")),
    *(("intensity.py", name) for name in ("add_noise", "_chosen", "_softening")),
}


@pytest.mark.parametrize("more", [[], ["model.norm=batch", "task.deep_supervision=true", "optimizer=adamw"]])
def test_a_training_does_not_wait(more, tmp_path, monkeypatch):
    """As on a GPU: augmentation in the main process, the guard reads one step late."""
    process = DataModule._process
    monkeypatch.setattr(DataModule, "_process", lambda data: process(data)._replace(on_gpu=True))
    monkeypatch.setattr(NonfiniteGuard, "_reads_late", lambda *_: True)
    for module in (muon, weight_averaging):
        monkeypatch.setattr(module, "read_at_once", lambda _: False)
    advance, values = ResumableEpochLoop.advance, Values()

    def watched(loop, fetcher):
        with values if loop.global_step in (2, 3) else nullcontext():
            advance(loop, fetcher)

    monkeypatch.setattr(ResumableEpochLoop, "advance", watched)
    steps = ["trainer.max_steps=6", "data.samples_per_epoch=80", "trainer.limit_val_batches=0"]
    seldom = ["trainer.log_every_n_steps=20", "augmentation=strong", "trainer.enable_progress_bar=true"]
    tiny.train(
        tiny.write_dataset(tmp_path / "data"), tmp_path / "run", "callbacks=default", *steps, *seldom, *more
    )
    assert values.asked - ON_HOST == set()
    assert ("hardware.py", "__bool__") in values.asked  # so that it is known to see them
