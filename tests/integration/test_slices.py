"""2D networks on the slices of volumes: which axis, what the patches are, and that prediction equals
validation.
"""

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from helpers import tiny
from helpers.loading import patch_dataset
from helpers.restoring import restore
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medconv import config
from medconv.data.case import Case, Grid
from medconv.data.io.images import read_label
from medconv.data.preprocessing.preprocess import (
    Entry,
    PreprocessingConfig,
    preprocess_image,
    preprocess_label,
)
from medconv.data.preprocessing.store import Store
from medconv.inference.load import load
from medconv.inference.predictor import Predictor
from medconv.inference.sliding_window import SlidingWindow
from medconv.metrics.dice import dice
from medconv.training import run
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_spacing_across_slices_is_the_cases_own_and_the_way_back_is_exact(axis):
    """In the plane 1 mm become 2; across it nothing mixes, and a label map comes back as it was."""
    rng, shape = np.random.default_rng(axis), (12, 14, 10)
    affine = np.diag([-1.0, 1.0, 1.0, 1.0])  # runs leftward: canonical is the other way round
    affine[axis, axis] *= 3.3
    image = rng.uniform(1, 2, (1, *shape)).astype(np.float32)
    known = {"percentile_00_5": 0.0, "percentile_99_5": 1.0, "mean": 0.0, "std": 1.0}
    recipe = PreprocessingConfig(2, (2.0, 2.0), ("none",), (known,), axis)
    prepared, placement = preprocess_image(image, Grid.of(shape, affine), recipe)
    halved = tuple(n if a == axis else n // 2 for a, n in enumerate(shape))
    assert prepared.shape == (1, *halved)
    assert placement.spacing_mm(halved) == pytest.approx([3.3 if a == axis else 2 for a in range(3)])
    changed = image.copy()
    np.moveaxis(changed[0], axis, 0)[4] += 1
    other = preprocess_image(changed, Grid.of(shape, affine), recipe)[0]
    difference = np.abs(other - prepared)[0].max(tuple({0, 1, 2} - {axis}))
    assert [bool(d > 1e-4) for d in difference] == [
        n == (shape[0] - 5 if axis == 0 else 4) for n in range(shape[axis])
    ]
    small = rng.integers(0, 3, halved)
    native = small
    for plane in {0, 1, 2} - {axis}:
        native = native.repeat(2, plane)
    label = preprocess_label(native, placement, recipe, 3)
    np.testing.assert_array_equal(label, small[::-1])
    logits = torch.nn.functional.one_hot(torch.from_numpy(label.astype(np.int64))).movedim(-1, 0).float()
    np.testing.assert_array_equal(restore(logits, placement), native)


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    """One case in the store: each voxel's value says where it lies."""
    folder = tmp_path_factory.mktemp("volume")
    shape = (9, 10, 11)
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    label = np.zeros(shape, np.uint8)
    label[2, 3, 4] = label[6, 7, 8] = 1
    rows = np.column_stack([np.ones(2), np.argwhere(label)]).astype(np.int32)
    source = folder / "source"
    source.write_bytes(b"")
    grid = Grid.of(shape, np.eye(4))
    _, placement = preprocess_image(image[None], grid, PreprocessingConfig(3, (1, 1, 1), ("none",), ({},)))
    store = Store(folder / "store")
    store.write(Case("case", (source,), source), Entry(image[None], label, rows, placement))
    return store, image


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_patches_are_slices(volume, axis):
    store, image = volume
    dataset = patch_dataset(store, ["case"], (5, 4), foreground_share=0.0, slice_axis=axis)
    windows = np.lib.stride_tricks.sliding_window_view(np.moveaxis(image, axis, 0), (5, 4), (1, 2))
    seen = set()
    for n in range(150):
        patch = dataset[n]["image"].numpy()
        assert patch.shape == (1, 5, 4) and dataset[n]["label"].shape == (1, 5, 4)
        (where,) = np.argwhere((windows == patch[0]).all((3, 4)))
        seen.add(int(where[0]))
    assert seen == set(range(image.shape[axis]))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_foreground_picks_the_slice(volume, axis):
    dataset = patch_dataset(volume[0], ["case"], (5, 4), foreground_share=1.0, slice_axis=axis)
    assert all(dataset[n]["label"].any() for n in range(30))


def test_small_slices_are_padded_in_the_plane(volume):
    store, image = volume
    patch = patch_dataset(store, ["case"], (16, 16), slice_axis=1)[0]["image"][0].numpy()
    inner = patch[4:13, 3:14]
    assert np.count_nonzero(patch) == np.count_nonzero(inner) == 9 * 11
    assert (image == inner[:, None]).all((0, 2)).sum() == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_volume_goes_through_slice_by_slice(axis):
    image, seen = torch.randn(1, 2, 9, 8, 7), []

    def network(windows):
        seen.append(windows.shape)
        return torch.stack([windows[:, 0], windows[:, 1], windows.sum(1)], 1) ** 2

    logits = SlidingWindow((4, 4), batch_size=3, slice_axis=axis)(network, image)
    expected = torch.stack([image[:, 0], image[:, 1], image.sum(1)], 1) ** 2
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert {shape[1:] for shape in seen} == {(2, 4, 4)}
    assert max(shape[0] for shape in seen) == 3


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices") / "run"
    settings = ["data.spatial_dims=2", "data.num_workers=2", "trainer.max_steps=12", "callbacks=default"]
    tiny.train(dataset, folder, *settings)
    return folder


def test_prediction_equals_validation(trained, dataset):
    path = trained / "checkpoints/best.ckpt"
    model = load(path)
    assert (model.preprocessing.slice_axis, model.preprocessing.spatial_dims, model.window.slice_axis) == (
        2,
        2,
        2,
    )
    rows = checkpoint_io.read(path)["medconv"]["validation"]
    assert rows
    for case, row in rows.items():
        image = dataset / f"imagesTr/{case}.nii.gz"
        label = Predictor([model])(image)
        assert label.shape == nib.load(image).shape
        scores = dice(label, read_label(dataset / f"labelsTr/{case}.nii.gz")[0], model.targets)
        assert scores == row
    assert max(value for row in rows.values() for value in row.values() if value is not None) > 0.02


def test_a_network_of_slices_refuses_a_single_slice(trained, tmp_path):
    path = tmp_path / "flat.nii.gz"
    nib.save(nib.Nifti1Image(np.ones((16, 18, 1), np.float32), np.eye(4)), path)
    with pytest.raises(
        ValueError, match=r"the network is 2D on slices of volumes, the image has shape \(16, 18, 1\)"
    ):
        Predictor.load([trained / "checkpoints/best.ckpt"])(path)


def test_pictures_of_volumes_are_written(trained):
    events = EventAccumulator(str(trained / "tensorboard"), {"images": 0}).Reload()
    tags = events.Tags()["images"]
    assert any(tag.startswith("images/val/") for tag in tags)
    known = yaml.safe_load((trained / "config.yaml").read_text())["derived"]
    assert (
        known["spatial_dims"] == len(known["patch_size"]) == len(known["spacing_mm"]) == 2
        and known["slice_axis"] == 2
    )


@pytest.mark.parametrize("model", ["dynunet", "segresnet"])
def test_other_models_take_slices(model, dataset, tmp_path):
    """Their YAMLs refer to what was planned: dimensions, kernels, strides."""
    own = [override for override in tiny.overrides(dataset) if not override.startswith("model.")]
    more = [
        f"model={model}",
        "data.spatial_dims=2",
        "data.patch_size=[16,24]",
        "trainer.max_steps=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    checked = config.validate(tiny.composed(*own, *more))
    assert run.train(checked, RunDir.of(checked, {}))["steps"] == 1
