"""medconv/features/pictures/callbacks.py: pictures of cases, saliency maps and kernels."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import small_runs, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from medconv.features.image_level import views as image_views
from medconv.features.pictures import callbacks
from medconv.features.pictures.callbacks import ImageLogger, LabelMapViews, _shown_convs, kernel_picture
from medconv.targets.label_map import LabelMapTargets
from medconv.training import trainer, validation
from medconv.training.growing_patch import GrowingPatch
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io

FAST = [
    "callbacks=default",
    "optimizer=adamw",
    "optimizer.lr=0.02",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "augmentation=none",
]
AVERAGED = ["weight_averaging=polynomial", "weight_averaging.begin=0", "weight_averaging.every=1"]


def test_saliency_maps_are_those_of_the_validated_weights(tmp_path, monkeypatch):
    """The averaged weights, as in the checkpoint, and not those that training would continue with."""
    folder = small_runs.write_classes(tmp_path / "light")
    states, draw = [], image_views.saliency.overlay

    def overlay(network, *more):
        states.append({name: value.clone() for name, value in network.state_dict().items()})
        return draw(network, *more)

    monkeypatch.setattr(image_views.saliency, "overlay", overlay)
    small_runs.train(folder, tmp_path / "run", *small_runs.OURS, *FAST, *AVERAGED)
    content = checkpoint_io.read(tmp_path / "run/checkpoints/last.ckpt")
    (name,) = (
        key
        for key in content["state_dict"]
        if key.endswith(next(n for n in states[0] if n.endswith("weight")))
    )
    (place,) = (n for n in states[0] if name.endswith(n))
    assert (
        len(states) == 3
        and len([tag for tag in small_runs.image_tags(tmp_path / "run") if tag.startswith("images/worst/")])
        == 3
    )
    torch.testing.assert_close(states[0][place], content["state_dict"][name], rtol=0, atol=0)
    assert not torch.equal(content["current_model_state"][name], content["state_dict"][name])


@pytest.mark.parametrize(("growing", "edge"), [(None, 64), (GrowingPatch((1, 1)), 32)])
def test_a_sample_is_shown_as_large_as_the_network_got_it(growing, edge, monkeypatch):
    shapes = []
    views = SimpleNamespace(sample=lambda image, label, number: shapes.append((image.shape, label.shape)))
    monkeypatch.setattr(callbacks, "views_of", lambda *_: views)
    callback = ImageLogger((1.0, 1.0), cases=2)
    monkeypatch.setattr(callback, "_show", lambda *_: None)
    counts = SimpleNamespace(total_batch_idx=0)
    run = SimpleNamespace(fit_loop=counts, accumulate_grad_batches=1, is_global_zero=True)
    batch = {"image": torch.zeros(1, 1, 64, 64), "label": torch.zeros(1, 1, 64, 64), "sample": [0]}
    module = SimpleNamespace(targets=None, growing_patch=growing)
    callback.on_train_batch_end(run, module, None, batch, 0)
    assert shapes == [((edge, edge), (1, edge, edge))]


def test_ignored_voxels_are_not_painted():
    image, label = np.ones((1, 3)), torch.tensor([[[0, 1, 9]]])
    for ignore, is_painted in ((None, True), (9, False)):
        classes = LabelMapTargets.of_classes(["background", "box"], ignore)
        views = LabelMapViews(classes, 1, (1.0, 1.0))
        pictures = [views.sample(image, shown, 0)[1] for shown in (label, label * (label != 9))]
        assert np.array_equal(*pictures) != is_painted


def test_the_cases_of_the_lowest_dice_are_kept_and_the_first_ones_shown_at_once():
    views = LabelMapViews(LabelMapTargets(("box",), ((1,),)), 2, (1.0, 1.0))
    at_once = []
    for case, dice in (("a", 0.9), ("b", None), ("c", 0.2), ("d", 0.95), ("e", 0.1234)):
        label = torch.zeros(1, 1, 8, 8, dtype=torch.int16)
        batch = {"image": torch.randn(1, 1, 8, 8), "label": label, "spacing_mm": (1.0, 1.0)}
        predicted = {"case": case, "prediction": label[0, 0], "dice": dice}
        at_once += [tag for tag, _ in views.validated(batch, predicted)]
    assert at_once == ["val/a", "val/b"]
    worst = list(views.worst(None))
    assert [tag for tag, _ in worst] == ["worst/e (Dice 0.123)", "worst/c (Dice 0.200)"]
    assert all(picture.dtype == np.uint8 for _, picture in worst)


def test_a_case_is_decoded_for_pictures_only_where_a_callback_shows_them(tmp_path, monkeypatch):
    kept = []
    validate = validation.LabelMapValidation.__call__

    def noted(self, *arguments):
        validated = validate(self, *arguments)
        kept.append("prediction" in validated.predicted)
        return validated

    monkeypatch.setattr(validation.LabelMapValidation, "__call__", noted)
    dataset = tiny.write_dataset(tmp_path / "tiny", cases=4)
    for option in ("default", "none"):
        tiny.train(dataset, tmp_path / option, f"callbacks={option}", "trainer.max_steps=1")
    # Both runs validate two cases in the sanity check, which nobody looks at, and again after the step
    assert kept == [False, False, True, True, *[False] * 4]


def test_without_its_feature_a_callback_is_left_out(caplog):
    caplog.set_level("INFO")
    missing = {"_target_": "medconv.features.no_such.Pictures"}
    assert trainer._users_callbacks({"pictures": missing}, RunDir(Path())) == []
    assert "callbacks.pictures has no effect: this installation lacks medconv.features.no_such" in caplog.text


LOGGED = ("callbacks=default", "logger=tensorboard", "trainer.max_steps=8")


def test_the_first_a_middle_and_the_last_convolution_with_several_taps_are_shown():
    convs = [nn.Conv2d(1, 1, 3) for _ in range(4)]
    network = nn.Sequential(nn.Conv2d(1, 1, 1), *convs, nn.Conv2d(1, 1, 1))
    assert list(_shown_convs(network)) == ["1", "3", "4"]
    assert _shown_convs(network)["3"] is convs[2]
    assert _shown_convs(nn.Linear(1, 1)) == {}
    assert list(_shown_convs(nn.Sequential(convs[0]))) == ["0"]


class Own(nn.Module):
    """A convolution that is no nn.Conv2d; its kernel is its `weight`, (out, in, *kernel_size)."""

    @property
    def weight(self) -> torch.Tensor:
        return torch.ones(2, 1, 3, 3)


def test_a_class_of_ones_own_is_shown_by_its_weight():
    network = nn.Sequential(Own(), nn.Linear(2, 2), nn.ConvTranspose2d(1, 1, 2), nn.Conv1d(1, 1, 3))
    assert list(_shown_convs(network)) == ["0"]


@pytest.mark.parametrize("conv", ["none", "basis"])
def test_a_run_logs_kernels_before_training_and_at_each_validation(tmp_path, conv):
    dataset = tiny.write_dataset(tmp_path / "data/tiny", cases=4)
    tiny.train(dataset, tmp_path / "run", *LOGGED, f"conv={conv}")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith("kernels/")]
    assert len(tags) == 3
    for tag in tags:
        images = events.Images(tag)
        assert [images[0].step, images[-1].step] == [0, 8]
        assert images[0].encoded_image_string != images[-1].encoded_image_string


def test_positive_is_red_negative_blue_and_zero_white():
    weight = np.zeros((1, 1, 3, 3))
    weight[0, 0, 0, 0] = 2.0
    weight[0, 0, 2, 2] = -2.0
    picture = kernel_picture(weight).astype(int)
    tap = 16  # pixels; a frame of 1 is around all taps
    assert picture[1 + tap // 2, 1 + tap // 2].tolist() == [178, 24, 43]
    assert picture[1 + 5 * tap // 2, 1 + 5 * tap // 2].tolist() == [33, 102, 172]
    assert picture[1 + 3 * tap // 2, 1 + 3 * tap // 2].tolist() == [255, 255, 255]


def test_kernels_share_a_scale_and_a_dead_layer_is_white():
    weight = np.ones((2, 1, 3, 3))
    weight[1] /= 10
    picture = kernel_picture(weight).astype(int)
    half = picture.shape[0] // 2
    assert picture[10, 10].tolist() == [178, 24, 43] and min(picture[half + 10, 10]) > 230
    assert kernel_picture(np.zeros((1, 1, 3, 3)))[10, 10].tolist() == [255, 255, 255]


def test_four_channels_evenly_spaced_and_the_slices_of_volumes_side_by_side():
    flat = kernel_picture(np.ones((64, 32, 3, 3)))
    assert flat.shape == (4 * 58, 4 * 58, 3) and flat.dtype == np.uint8
    volume = kernel_picture(np.ones((2, 1, 3, 3, 5)))
    assert volume.shape == (2 * 58, 5 * 50 + 8, 3)
    weight = np.zeros((64, 1, 3, 3))
    weight[-1] = 1.0  # the last channel is always shown
    assert kernel_picture(weight)[-20, 20].tolist() == [178, 24, 43]


def test_a_validation_case_has_the_proportions_of_its_own_voxels():
    """Its grid is that of the file, and not that of training samples."""
    views = LabelMapViews(LabelMapTargets(("box",), ((1,),)), 1, (1.0, 1.0))
    label = torch.zeros(1, 1, 40, 40, dtype=torch.int16)
    batch = {"image": torch.randn(1, 1, 40, 40), "label": label, "spacing_mm": (1.0, 4.0)}
    predicted = {"case": "a", "prediction": label[0, 0], "dice": 0.5}
    ((_, picture),) = views.validated(batch, predicted)
    _, sample = views.sample(np.ones((40, 40)), label[0], 0)
    height, width = picture.shape[0], picture.shape[1] // 3  # image, reference and prediction
    assert height > 3 * width
    assert sample.shape[0] < 2 * (sample.shape[1] // 2)
