"""medconv/training/callbacks/image_logger.py: whose saliency maps are logged, and what is painted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_runs

from medconv.targets.label_map import LabelMapTargets
from medconv.training.callbacks import case_views
from medconv.utils import checkpoint_io

FAST = [
    "optimizer=adamw",
    "optimizer.lr=0.02",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "augmentation=none",
]
AVERAGED = ["weight_averaging=polynomial", "weight_averaging.begin=0", "weight_averaging.every=1"]


def test_saliency_maps_are_those_of_the_validated_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The averaged weights, as in the checkpoint, and not those that training would continue with."""
    folder = small_runs.write_classes(tmp_path / "light")
    states, draw = [], case_views.saliency.overlay

    def overlay(network: Any, *more: Any) -> Any:
        states.append({name: value.clone() for name, value in network.state_dict().items()})
        return draw(network, *more)

    monkeypatch.setattr(case_views.saliency, "overlay", overlay)
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


def test_ignored_voxels_are_not_painted() -> None:
    image, label = np.ones((1, 3)), torch.tensor([[[0, 1, 9]]])
    for ignore, is_painted in ((None, True), (9, False)):
        classes = LabelMapTargets.of_classes(["background", "box"], ignore)
        views = case_views.LabelMapViews(classes, 1, (1.0, 1.0))
        pictures = [views.sample(image, shown, 0)[1] for shown in (label, label * (label != 9))]
        assert np.array_equal(*pictures) != is_painted
