"""medconv/training/growing_patch.py: batches are cut to sizes that grow; runs with it resume exactly."""

import json
from pathlib import Path

import pytest
import torch
from helpers import tiny

from medconv.config import ConfigError, Derived, RunConfig, TrainerConfig
from medconv.training.growing_patch import GrowingPatch, growing_patch_of
from medconv.training.optim.lr_schedulers import ProgressSchedule

LAYERED = ("data.patch_size=[16,16,16]", "model.channels=[4,4,4]", "model.strides=[2,2]")


def test_edges_grow_from_half_to_the_whole_patch():
    growing = GrowingPatch((8, 8, 2))
    sizes = [growing.size((40, 56, 10), progress) for progress in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert sizes[0] == (24, 32, 6) and sizes[-2] == sizes[-1] == (40, 56, 10)
    assert sizes == sorted(sizes) and all(
        n % d == 0 for size in sizes for n, d in zip(size, (8, 8, 2), strict=True)
    )


def test_at_the_coarsest_stage_two_voxels_are_left_where_there_were_as_many():
    assert GrowingPatch((16, 16)).size((48, 16), 0.0) == (32, 16)


@pytest.mark.parametrize(
    ("patch", "divisor", "without_limit"),
    [
        ((128, 128, 128), (32, 32, 32), 3),
        ((192, 160, 96), (32, 32, 16), 9),
        ((160, 192, 64), (16, 16, 8), 16),
        ((256, 256, 12), (32, 32, 1), 11),
        ((512, 448), (64, 64), 8),
    ],
)
def test_a_run_has_as_many_sizes_as_are_allowed(patch, divisor, without_limit):
    every = GrowingPatch(divisor).sizes(patch)
    few = GrowingPatch(divisor, max_sizes=4).sizes(patch)
    assert len(every) == without_limit and len(few) == min(4, without_limit)
    # Begin, end and order stay; both are whole from the same progress on
    assert (few[0], few[-1]) == (every[0], every[-1]) == (every[0], patch) and few == sorted(few)
    assert GrowingPatch(divisor, 4).size(patch, 0.8) == patch


def test_the_middle_of_image_and_label_is_left():
    image = torch.arange(2 * 16 * 16).view(2, 1, 16, 16)
    growing = GrowingPatch((4, 4))
    batch = growing({"image": image, "label": image.clone(), "sample": torch.arange(2)}, 0.0)
    assert batch["image"].equal(image[..., 4:12, 4:12]) and batch["image"].equal(batch["label"])
    assert batch["sample"].tolist() == [0, 1]
    assert growing({"image": image, "label": image}, 0.8)["image"].shape == image.shape


def trained_sizes(dataset, folder, *settings):
    """The edges of the patches of each step, and the summary."""
    spy = ["+callbacks.sizes._target_=helpers.tiny.Sizes", f"+callbacks.sizes.path={folder}.sizes"]
    summary = tiny.train(dataset, folder, *LAYERED, *spy, *settings)
    return [json.loads(line) for line in Path(f"{folder}.sizes").read_text().splitlines()], summary


def test_a_run_trains_on_growing_patches(dataset, tmp_path):
    seen, _ = trained_sizes(dataset, tmp_path / "run", "trainer.max_steps=10")
    assert seen[0] == [8, 8, 8] and seen[-1] == [16, 16, 16] and seen == sorted(seen)
    assert len(seen) == 10 and [12, 12, 12] in seen
    seen, _ = trained_sizes(dataset, tmp_path / "whole", "trainer.max_steps=2", "schedule.patch=whole")
    assert seen == [[16, 16, 16]] * 2


class SquareSchedule(ProgressSchedule):
    """A schedule of the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_steps: int = 0) -> None:
        super().__init__(optimizer, lambda progress: 1 - progress**2, warmup_steps)


def square(optimizer: torch.optim.Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """A function that returns a schedule, without a class of its own."""
    return SquareSchedule(optimizer, warmup_steps)


@pytest.mark.parametrize("schedule", ["SquareSchedule", "square"])
def test_patches_grow_with_a_schedule_of_the_users_own(dataset, tmp_path, schedule):
    own = f"scheduler._target_={__name__}.{schedule}"
    seen, _ = trained_sizes(dataset, tmp_path / "run", own, "trainer.max_steps=10")
    assert seen[0] == [8, 8, 8] and seen[-1] == [16, 16, 16] and len(seen) == 10


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.patch=small", "schedule.patch must be progressive, whole or null, got small"),
        (
            "scheduler._target_=torch.optim.lr_scheduler.ConstantLR ~scheduler.warmup_steps",
            "does not follow the run's progress",
        ),
        ("trainer.max_epochs=-1", "a run without an end has no progress"),
    ],
)
def test_progressive_patches_where_they_cannot_be_are_refused(dataset, tmp_path, override, message):
    arguments = ("schedule.patch=progressive", "trainer.max_steps=-1", *override.split())
    with pytest.raises(ConfigError, match=message):
        tiny.train(dataset, tmp_path / "run", *arguments)


def test_a_run_without_an_end_trains_on_whole_patches(dataset, tmp_path):
    """Its progress stays 0: it would see the smallest patches until early stopping ends it."""
    stopping = ("early_stopping=patience", "early_stopping.patience=1", "early_stopping.min_delta=0.9")
    endless = ("trainer.max_steps=-1", "trainer.max_epochs=-1", "data.samples_per_epoch=4", *stopping)
    seen, summary = trained_sizes(dataset, tmp_path / "run", *endless)
    assert summary["stopped_early"]
    assert all(size == [16, 16, 16] for size in seen)


def test_patches_have_few_sizes_where_kernels_are_tuned_for_each(monkeypatch):
    def max_sizes(**settings):
        config = RunConfig(
            derived=Derived(per_voxel=True),
            scheduler={"_target_": f"{__name__}.square"},
            trainer=TrainerConfig(**settings),
        )
        growing = growing_patch_of(config, (8, 8))
        assert growing is not None
        return growing.max_sizes

    assert max_sizes(accelerator="cpu", benchmark=True) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert max_sizes() == 4
    assert max_sizes(benchmark=True, deterministic=True) == 4
    assert max_sizes(benchmark=False) is None
    assert max_sizes(deterministic=True) is None
    assert max_sizes(accelerator="cpu") is None
