"""medconv/evaluation/raters.py: references of several raters, as files, in the result and as a table."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.label_maps import folders, label_of, save, save_spaced, with_names

import medconv
from medconv.cli.evaluate import parser
from medconv.evaluation import segmentation
from medconv.evaluation.raters import AMONG, RATER_DICE, rater_dice
from medconv.evaluation.results import table
from medconv.metrics import consensus
from medconv.targets.label_map import LabelMapTargets


@pytest.fixture
def rated(tmp_path):
    """Predictions, references of the first rater, and two further raters, of which one lacks case b."""
    predicted = {"a": label_of(10, 10), "b": label_of(8, 0)}
    predictions, references = folders(tmp_path, predicted, {"a": label_of(10, 10), "b": label_of(8, 0)})
    second = {"a": label_of(12, 8), "b": label_of(6, 0)}
    for case, label in second.items():
        save_spaced(tmp_path / "second" / f"{case}.nii.gz", label)
    # turned from right to left over the same grid
    affine = np.diag([-1.0, 2, 3, 1])
    affine[0, 3] = 5
    save(tmp_path / "third" / "a.nii.gz", label_of(12, 8)[::-1], affine)
    return predictions, references, [tmp_path / "second", tmp_path / "third"]


def test_the_reference_is_the_consensus_and_each_rater_has_a_score(rated):
    predictions, references, raters = rated
    evaluation = segmentation.evaluate(predictions, references, raters=raters)
    result = evaluation.result
    # in case a two of three have 12 and 8 voxels; in case b of two raters the background wins
    rows = {row["case"]: row["dice"] for row in result["cases"]}
    assert rows["a"] == {"1": pytest.approx(2 * 10 / 22), "2": pytest.approx(2 * 8 / 18)}
    assert rows["b"]["1"] == pytest.approx(2 * 6 / 14)
    scores = result["raters"]
    assert list(scores) == [str(references), *map(str, raters), "among raters"]
    assert scores[str(references)] == {"dice": 1.0, "per_class": {"1": 1.0, "2": 1.0}, "n": 2}
    assert scores[str(raters[1])]["n"] == 1
    assert scores[str(raters[1])]["per_class"]["1"] == pytest.approx(2 * 10 / 22)
    among = scores["among raters"]["per_class"]["1"]
    assert among == pytest.approx(((20 / 22 + 20 / 22 + 1) / 3 + 12 / 14) / 2)
    text = table(evaluation)
    assert "the raters' consensus by majority" in text and "among raters: " in text


def test_staple_is_another_consensus(rated):
    predictions, references, raters = rated
    label_maps = [label_of(10, 10), label_of(12, 8), label_of(12, 8)]
    expected = consensus.staple(label_maps)
    result = segmentation.evaluate(predictions, references, raters=raters, consensus="staple").result
    overlap = 2 * ((expected == 1) & (label_maps[0] == 1)).sum() / ((expected == 1).sum() + 10)
    assert result["cases"][0]["dice"]["1"] == pytest.approx(overlap)
    assert result["consensus"] == "staple"
    assert parser().parse_args([*["--predictions", "p", "--output", "o.json"], "--consensus", "staple"])


def test_without_raters_nothing_is_added(rated):
    predictions, references, _ = rated
    assert not {"raters", "consensus"} & set(segmentation.evaluate(predictions, references).result)


def test_from_python_and_with_classes_that_are_not_annotated(rated):
    predictions, references, raters = rated
    with_names(predictions, "background", "one", "two")
    scores = medconv.evaluate(predictions, references, raters=raters)
    assert scores.per_class["one"]["dice"] == pytest.approx((20 / 22 + 12 / 14) / 2)
    result = segmentation.evaluate(predictions, references, raters=raters, annotated=["a=one"]).result
    assert result["raters"][str(raters[0])]["per_class"]["two"] is None
    with pytest.raises(ValueError, match="raters and consensus are for files"):
        medconv.evaluate(label_of(1), label_of(1), spacing_mm=(1, 1, 1), raters=["second"])


def test_voxels_that_one_rater_leaves_unlabelled_are_ignored():
    raters = segmentation.raters_of([], None, {}, None)
    maps = [np.array([1, 1, 0, 9]), np.array([1, 9, 0, 1]), np.array([0, 1, 0, 1])]
    np.testing.assert_array_equal(raters.reference(maps, 9), [1, 9, 0, 9])


def test_unlabelled_voxels_teach_staple_nothing():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 400)
    maps = [np.where(rng.random(400) < share, 1 - truth, truth) for share in (0.1, 0.3, 0.35)]
    raters = replace(segmentation.raters_of([], None, {}, None), consensus="staple")
    alone = raters.reference(maps, 9)
    unlabelled = (np.full(40_000, value) for value in (0, 9, 0))
    beside = [np.concatenate(parts) for parts in zip(maps, unlabelled, strict=True)]
    np.testing.assert_array_equal(raters.reference(beside, 9)[:400], alone)
    assert (raters.reference(beside, 9)[400:] == 9).all()
    assert (raters.reference([np.full((2, 2), 9)] * 2, 9) == 9).all()


def test_dice_among_raters_leaves_out_what_either_left_unlabelled():
    targets = LabelMapTargets(("one",), ((1,),), 9)
    first, second = np.array([1, 1, 9, 9, 0]), np.array([1, 1, 1, 1, 0])
    for pair in ((first, second), (second, first)):
        among = rater_dice(first, dict(zip("ab", pair, strict=True)), targets)[RATER_DICE][AMONG]
        assert among == {"one": 1.0}


@pytest.mark.parametrize(
    ("raters", "how", "message"),
    [
        ([], "staple", "consensus staple: needs raters besides the references"),
        (["labelsTr"], None, "raters .*labelsTr: given twice, or the references themselves"),
        (["second", "second"], None, "raters .*second: given twice"),
        (["second", "other/../second"], None, "raters .*second: given twice"),
        (["nowhere"], None, "raters=.*nowhere: no such folder"),
        (["other"], None, "raters .*other: no label map there for a, b"),
        (["second"], "vote", "consensus must be one of majority, staple, got vote"),
    ],
)
def test_what_makes_no_consensus_is_refused(rated, tmp_path, raters, how, message):
    predictions, references, _ = rated
    save_spaced(tmp_path / "other/c.nii.gz", label_of(1))
    with pytest.raises(ValueError, match=message):
        segmentation.evaluate(predictions, references, raters=[tmp_path / r for r in raters], consensus=how)


def test_an_undeclared_value_or_another_grid_names_the_rater_s_file(rated):
    predictions, references, raters = rated
    with_names(predictions, "background", "one", "two")
    save_spaced(raters[0] / "a.nii.gz", label_of(1, 1, 1))
    with pytest.raises(ValueError, match=r"case a: .*second/a.nii.gz: label value 3 is not declared"):
        segmentation.evaluate(predictions, references, raters=raters)
    save_spaced(raters[0] / "a.nii.gz", label_of(1)[:3])
    with pytest.raises(ValueError, match=r"case a: .*second/a.nii.gz: shape .* differs"):
        segmentation.evaluate(predictions, references, raters=raters)
