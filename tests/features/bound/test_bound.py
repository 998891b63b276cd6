"""medconv/features/bound: bounds against their definition, their coverage, and the commands around them."""

import json

import numpy as np
import pytest
from helpers import tiny
from helpers.label_maps import folders, label_of

from medconv.data.io.manifest import read_manifest
from medconv.evaluation import segmentation
from medconv.evaluation.results import table
from medconv.features.bound import bounds
from medconv.features.report.segmentation_report import page as page_of
from medconv.utils.exit_codes import DONE, USER


def test_the_margin_is_an_order_statistic_of_the_distances():
    """Nine distances, .1 to .9: their 9th of (9 + 1) x .9, the 5th of 10 x .5; eight are too few for .9."""
    estimated = [0.1 * n for n in range(1, 10)]
    true = [0.0] * 9
    assert bounds.margin(estimated, true, 0.9) == pytest.approx(0.9)
    assert bounds.margin(estimated, true, 0.5) == pytest.approx(0.5)
    assert bounds.margin(estimated[:8], true[:8], 0.9) is None


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_bounds_hold_in_the_wanted_share_however_poor_the_estimate(noise):
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):
        true = rng.beta(8, 2, 60)
        estimated = np.clip(true + noise * rng.standard_normal(60) + 0.05, 0, 1)
        distance = bounds.margin(estimated[:30].tolist(), true[:30].tolist(), 0.9)
        assert distance is not None
        held += (true[30:] >= estimated[30:] - distance).tolist()
    # 28 of 31 by the rank; the standard error of 12,000 dependent answers is below half a per cent
    assert 0.9 <= np.mean(held) <= 0.92


def estimates(folder, by_case):
    (folder / "quality").mkdir(exist_ok=True)
    for case, dice in by_case.items():
        content = {"networks": 2, "method": "pairwise_dice", "classes": {"1": {"dice": dice}}}
        (folder / "quality" / f"{case}.json").write_text(json.dumps(content))


def evaluated(tmp_path, name, sizes):
    """Predictions of discs that are too small by so many voxels, with estimates .05 above the true Dice."""
    true = {case: label_of(10) for case in sizes}
    predicted = {case: label_of(10 - missing) for case, missing in sizes.items()}
    (tmp_path / name).mkdir()
    predictions, references = folders(tmp_path / name, predicted, true)
    dice = {case: 2 * (10 - missing) / (20 - missing) + 0.05 for case, missing in sizes.items()}
    estimates(predictions, {case: min(1.0, value) for case, value in dice.items()})
    return predictions, references


def test_the_command_bounds_new_cases_and_evaluate_says_whether_it_held(tmp_path, monkeypatch, capsys):
    predictions, references = evaluated(tmp_path, "known", {f"c{i}": i for i in range(1, 7)})
    calibration = tmp_path / "metrics.json"
    evaluation = segmentation.evaluate(predictions, references)
    calibration.write_text(json.dumps(evaluation.result))
    new, truth = evaluated(tmp_path, "new", {"good": 1, "poor": 5, "wrong": 9})
    estimates(new, {"wrong": 0.95, "lost": None})
    words = ["--predictions", new, "--calibration", calibration, "--share", "0.8", "--limit", "0.8"]
    assert tiny.call(monkeypatch, "bound", *words) == DONE
    printed = capsys.readouterr().out
    assert "of the cases to bound" not in printed
    assert "2 cases to look at" in printed
    assert printed.index("poor") < printed.index("lost")
    rows = {row.case: row for row in bounds.read(new / bounds.FILE)}
    looked_at = [line for line in (new / bounds.FILE).read_text().splitlines() if line.endswith(",1")]
    assert [line.split(",")[0] for line in looked_at] == ["lost", "poor"]
    # all distances are .05
    assert rows["poor"].lower == pytest.approx(2 * 5 / 15)
    assert rows["lost"].lower is None
    again = segmentation.evaluate(new, truth)
    row = again.result["bound"]["per_class"]["1"]
    assert row["n"] == 3
    assert row["share"] == pytest.approx(2 / 3)
    assert "1: the lower bound of Dice held in 2 of 3 cases, wanted 0.8" in table(again)
    assert "Lower bounds of Dice" in page_of(again)
    # other predictions since: their manifest has no bounds
    manifest = {"settings": {}, "cases": {}, "overwriting": [], "class_names": ["background", "1"]}
    (new / "prediction.json").write_text(json.dumps(manifest))
    assert "bound" not in segmentation.evaluate(new, truth).result


def test_too_few_cases_are_told_how_many_are_needed(tmp_path, monkeypatch, capsys):
    predictions, references = evaluated(tmp_path, "known", {f"c{i}": i for i in range(1, 4)})
    calibration = tmp_path / "metrics.json"
    calibration.write_text(json.dumps(segmentation.evaluate(predictions, references).result))
    words = ["--predictions", predictions, "--calibration", calibration, "--share", "0.93"]
    assert tiny.call(monkeypatch, "bound", *words) == DONE
    out = capsys.readouterr().out
    assert "also has 3 of the cases to bound (c1, c2, c3)" in out
    assert "lower bounds of 0 cases\n" in out
    assert "--share 0.93 needs at least 14" in out  # 14 / 15 is the first above 0.93
    # and evaluation has nothing to say of bounds that are not there
    assert "the lower bound of Dice" not in table(segmentation.evaluate(predictions, references))


def test_cases_that_the_networks_were_trained_on_calibrate_with_a_warning(tmp_path, caplog):
    predictions, references = evaluated(tmp_path, "known", {"c1": 1, "c2": 2})
    manifest = {"settings": {}, "cases": {}, "overwriting": [], "class_names": ["background", "1"]}
    (predictions / "prediction.json").write_text(json.dumps({**manifest, "train_cases": ["c2", "c9"]}))
    calibration = tmp_path / "metrics.json"
    calibration.write_text(json.dumps(segmentation.evaluate(predictions, references).result))
    new, _ = evaluated(tmp_path, "new", {"c3": 1})
    bounds.bounds(new, calibration, 0.5)
    (record,) = (
        record for record in caplog.records if record.levelname == "WARNING" and "bound" in record.name
    )
    assert "the networks were trained on 1 of its cases (c2)" in record.getMessage()


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("{}", [], "metrics.json: has no estimates beside true Dice; expected what medconv evaluate writes"),
        ("{}", ["--share", "1"], "--share must lie between 0 and 1, got 1.0"),
        (None, [], "metrics.json"),
    ],
)
def test_what_cannot_be_used_is_one_line(content, words, message, tmp_path, monkeypatch, capsys):
    calibration = tmp_path / "metrics.json"
    if content is not None:
        calibration.write_text(content)
    code = tiny.call(monkeypatch, "bound", "--predictions", tmp_path, "--calibration", calibration, *words)
    assert code == USER
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_predictions_without_estimates_are_named(tmp_path):
    calibration = tmp_path / "metrics.json"
    calibration.write_text(json.dumps({"quality": {"cases": {}, "per_class": {}}, "cases": []}))
    with pytest.raises(ValueError, match="no estimates of Dice; predict with --quality"):
        bounds.bounds(tmp_path, calibration, 0.9)


def test_the_manifest_of_the_predictions_has_the_bounds(tmp_path):
    manifest = {"settings": {}, "cases": {}, "overwriting": [], "class_names": ["background", "1"]}
    (tmp_path / "prediction.json").write_text(json.dumps(manifest))
    rows = [bounds.Bound("a", "1", 0.9, 0.85, 0.9), bounds.Bound("b", "1", 0.7, 0.6, 0.9)]
    bounds.write(rows, tmp_path, 0.8)
    added = {"share": 0.9, "cases": {"a": {"1": 0.85}, "b": {"1": 0.6}}, "limit": 0.8, "look_at": ["b"]}
    assert read_manifest(tmp_path) == {**manifest, "lower_bounds": added}


def test_a_calibration_of_another_method_is_refused(tmp_path):
    """The soft Dice of one network is no agreement of several."""
    estimates(tmp_path, {"new": 0.9})
    calibration = tmp_path / "metrics.json"
    measured = {"method": "soft_dice_confidence", "cases": {"a": {"1": 0.8}}, "per_class": {"1": {}}}
    content = {"quality": measured, "cases": [{"case": "a", "dice": {"1": 0.7}}]}
    calibration.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its estimates are soft_dice_confidence, those of .* pairwise_dice"):
        bounds.bounds(tmp_path, calibration, 0.5)
    calibration.write_text(json.dumps({**content, "quality": {**measured, "method": "pairwise_dice"}}))
    (row,) = bounds.bounds(tmp_path, calibration, 0.5)
    assert row.lower == pytest.approx(0.8)
