"""medconv/training/run.py: the loss of the targets, and settings that contradict each other."""

from pathlib import Path

from helpers.picture_tables import checked

from medconv.targets.label_map import LabelMapTargets
from medconv.training.run import with_loss


def test_an_open_loss_is_that_of_the_targets_with_the_keys_of_the_user():
    targets = LabelMapTargets.of_classes(["background", "a"])
    config = with_loss(checked(Path("labels.csv")), targets)
    assert config.loss["_target_"].endswith("DiceCrossEntropy")
    chosen = checked(Path("labels.csv"), "loss=tversky")
    assert with_loss(chosen, targets).loss == chosen.loss
