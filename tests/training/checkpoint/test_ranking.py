"""medconv/training/checkpoint/writer.py: by each validation, or by their running mean."""

import math

import pytest
from lightning import LightningModule, Trainer

from medconv.targets.scores import CROSS_ENTROPY, DICE, MAE
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter, Ranking

VALUES = (0.5, 0.1, 0.4, 0.2, 0.15, 0.3)
MEANS = (0.5, 0.22, 0.346, 0.2438, 0.17814, 0.263442)  # 0.7 of each value, 0.3 of the mean before


def best_of(metric, *values, ranking=None):
    """The best value after each validation."""
    ranking = ranking or Ranking()
    best = []
    for value in values:
        before = ranking.best
        is_best = ranking.add(value, metric)
        assert is_best or ranking.best == before
        best.append(ranking.best)
    return best


def test_dice_and_errors_rank_each_validation():
    assert best_of(DICE, 0.5, 0.9, math.nan, 0.8) == [0.5, 0.9, 0.9, 0.9]
    assert best_of(MAE, math.nan, 5, 3, math.inf, 4) == [math.inf, 5, 3, 3, 3]


def test_cross_entropy_ranks_by_the_running_mean():
    """A single low value at the start of a run is no reason to keep that checkpoint."""
    lowest = [VALUES[MEANS.index(min(MEANS[:count]))] for count in range(1, 7)]
    assert best_of(CROSS_ENTROPY, *VALUES) == lowest == [0.5, 0.1, 0.1, 0.1, 0.15, 0.15]
    assert best_of(CROSS_ENTROPY, math.nan, 0.5, math.nan, 0.1)[1:] == [0.5, 0.5, 0.1]


def test_a_ranking_that_goes_on_ranks_as_one_that_never_stopped():
    for count in range(1, 6):
        first, second = Ranking(), Ranking()
        best_of(CROSS_ENTROPY, *VALUES[:count], ranking=first)
        second.load_state_dict(first.state_dict())
        assert best_of(CROSS_ENTROPY, *VALUES[count:], ranking=second)[-1] == pytest.approx(0.15)


def test_the_state_of_an_earlier_version_has_no_means():
    ranking = Ranking()
    ranking.load_state_dict({"best": 0.12})
    assert best_of(CROSS_ENTROPY, 0.13, 0.05, ranking=ranking) == [0.12, 0.05]


@pytest.mark.parametrize("has_best", [False, True])
def test_a_run_from_the_checkpoint_of_another_folder_ranks_anew(tmp_path, has_best):
    """There is no best checkpoint here, with which its validations could be compared."""
    writer = CheckpointWriter(tmp_path, AtomicCheckpointIO(), every=60)
    writer.load_state_dict({"best": 0.1, "mean": 0.1, "best_mean": 0.1})
    if has_best:
        (tmp_path / "best.ckpt").touch()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    writer.on_train_start(trainer, LightningModule())
    assert writer.best == (0.1 if has_best else None)
