"""medconv/training/validation.py: what a validation of label maps returns, slab after slab."""

import numpy as np
import pytest
import torch
from helpers.restoring import restore
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from medconv.data.case import Grid
from medconv.data.loading.patch_dataset import Opaque
from medconv.data.preprocessing import preprocess
from medconv.data.preprocessing.preprocess import CropInfo
from medconv.inference.sliding_window import SlidingWindow
from medconv.models.unet import UNet
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.training.validation import LabelMapValidation

CLASSES_OF_VOXELS = LabelMapTargets.of_classes(("background", "box", "hole"))
IGNORING = LabelMapTargets.of_classes(("background", "box", "hole"), ignore=9)
REGIONS = RegionTargets(("all", "core", "edge"), ((1, 2), (2,), (1,)), None, (1, 2, 1))


def as_it_is(shape):
    """Neither cropped nor resampled."""
    return CropInfo(Grid.of(shape, np.eye(4)), shape, tuple((0, voxels) for voxels in shape))


def batch_of(image, label, case="a"):
    crop_info = Opaque(as_it_is(tuple(image.shape[2:])))
    return {"case": case, "image": image, "label": label, "reference": label[0, 0], "crop_info": crop_info}


def test_a_compiled_network_is_compiled_once_for_training_and_once_for_all_windows():
    """Cases of 1, 2, 5 and 8 windows, in batches of 4."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.manual_seed(0)
    network = UNet(3, 1, 2, (2, 4), (2,), norm="instance")
    window = SlidingWindow((8, 8, 8), overlap=0, batch_size=4)
    plain, compiled = (
        LabelMapValidation(window, LabelMapTargets(("box",), ((1,),)), whole_batches=whole_batches)
        for whole_batches in (False, True)
    )
    network.eval()
    batches = []
    for windows in (1, 2, 5, 8):
        shape = (8, 8, 8 * windows)
        image, label = torch.rand(1, 1, *shape), torch.zeros(1, 1, *shape, dtype=torch.uint8)
        batches.append(batch_of(image, label, str(windows)))
    expected = [plain(network, batch) for batch in batches]
    network.compile(backend=counter)
    network.train()(torch.rand(2, 1, 8, 8, 8)).sum().backward()
    network.eval()
    found = [compiled(network, batch) for batch in batches]
    assert counter.frame_count == 2
    for one, other in zip(found, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-4)


@pytest.mark.parametrize(
    "targets", [CLASSES_OF_VOXELS, IGNORING, REGIONS], ids=["classes", "ignore", "regions"]
)
@pytest.mark.parametrize("slice_axis", [None, 2])
@pytest.mark.parametrize("annotated", [None, (True, False, True)])
def test_slabs_give_what_all_logits_give(targets, slice_axis, annotated, monkeypatch):
    """Dice, loss and the label map on the prepared grid; some planes are between the slabs' own."""
    monkeypatch.setattr(preprocess, "_VOXELS", 2 * 9 * 8)
    native_shape = (9, 10, 8)
    crop_info = CropInfo(Grid.of((11, 12, 8), np.eye(4)), (11, 12, 8), ((1, 10), (2, 12), (0, 8)))
    rng = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, 14, 31, 12, generator=rng)
    label = torch.randint(3, (1, 1, 14, 31, 12), generator=rng, dtype=torch.uint8)
    label[label == 2] = 9 if targets.ignore else 2
    reference = torch.randint(3, (11, 12, 8), generator=rng, dtype=torch.uint8)
    patch = (8, 8) if slice_axis is not None else (8, 8, 8)
    window = SlidingWindow(patch, slice_axis=slice_axis)
    batch = {
        "case": "a",
        "image": image,
        "label": label,
        "reference": reference,
        "annotated": annotated,
        "crop_info": Opaque(crop_info),
    }
    validate = LabelMapValidation(window, targets)
    validated = validate(nn.Identity(), batch, keeps_prediction=True)
    logits = window(nn.Identity(), image)
    assert logits.shape == image.shape and native_shape == crop_info.content_shape
    native = restore(logits[0], crop_info, targets.decode)
    assert validated.rows == {"a": targets.dice(native, reference.numpy(), annotated)}
    assert validated.losses["a"] == pytest.approx(targets.cross_entropy(logits, label, annotated), rel=1e-5)
    torch.testing.assert_close(validated.predicted["prediction"], targets.decode(logits[0]))


def test_a_case_without_labelled_voxels_has_no_loss():
    label = torch.full((1, 1, 8, 8, 8), 9, dtype=torch.uint8)
    batch = batch_of(torch.zeros(1, 3, 8, 8, 8), label)
    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), IGNORING)
    assert validate(nn.Identity(), batch).losses == {"a": None}


def test_a_slab_is_scored_on_the_cpu_if_the_gpu_has_no_memory_left(monkeypatch):
    fails = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")]
    cross_entropy = LabelMapTargets.cross_entropy

    def failing(targets, *arguments):
        for error in fails:
            fails.remove(error)
            raise error
        return cross_entropy(targets, *arguments)

    monkeypatch.setattr(LabelMapTargets, "cross_entropy", failing)
    targets = LabelMapTargets(("box",), ((1,),))
    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), targets)
    image = torch.randn(1, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    label = image.argmax(1, keepdim=True).to(torch.uint8)
    batch = batch_of(image, label)
    validated = validate(nn.Identity(), batch)
    assert not fails and validated.rows == {"a": {"box": 1.0}}
    assert validated.losses == validate(nn.Identity(), batch).losses and validated.losses["a"] is not None


def test_outputs_that_are_not_finite_are_said_with_their_case(caplog):
    validate = LabelMapValidation(SlidingWindow((8, 8, 8)), LabelMapTargets(("box",), ((1,),)))
    image = torch.randn(1, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    label = image.argmax(1, keepdim=True).to(torch.uint8)
    validate(nn.Identity(), batch_of(image, label))
    assert not caplog.records
    image[0, 0, 1, 2, 3] = torch.nan
    validate(nn.Identity(), batch_of(image, label, "b"))
    assert "case b: the network's outputs are not finite, so its scores say nothing" in caplog.text
