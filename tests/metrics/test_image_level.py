"""medconv/metrics/image_level.py: against slow second implementations and torchmetrics; where a number is
undefined; intervals.
"""

import time

import numpy as np
import pytest
import torch
import torchmetrics.functional as torchmetrics
import torchmetrics.functional.classification as torch_classes

from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets
from tests.reference import scores as reference

TWO, FOUR = (
    ImageLevelTargets("multiclass", ("normal", "pneumonia")),
    ImageLevelTargets("multiclass", ("a", "b", "c", "d")),
)
FINDINGS, NUMBERS = (
    ImageLevelTargets("multilabel", ("effusion", "nodule", "mass")),
    ImageLevelTargets("regression", ("age", "weight")),
)


def drawn(image_targets: ImageLevelTargets, cases: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Answers of some worth, with ties."""
    rng = np.random.default_rng(seed)
    if image_targets.kind == "regression":
        truth = rng.normal(50, 20, (cases, image_targets.num_values))
        return truth + rng.normal(3, 10, truth.shape), truth
    if image_targets.kind == "multilabel":
        truth = (rng.random((cases, image_targets.num_values)) < [0.5, 0.2, 0.1]).astype(float)
    else:
        truth = rng.integers(image_targets.num_outputs, size=(cases, 1)).astype(float)
    logits = image_level.positives(image_targets, truth) + rng.normal(
        0, 1, (cases, image_targets.num_outputs)
    )
    return image_targets.decode(torch.tensor(logits.round(1))).numpy(), truth


def slow(image_targets: ImageLevelTargets, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    values = outputs.astype(float).tolist()
    if image_targets.kind == "multiclass":
        return reference.classes(values, truth[:, 0].astype(int).tolist())
    return {"multilabel": reference.findings, "regression": reference.numbers}[image_targets.kind](
        values, truth.tolist()
    )


@pytest.mark.parametrize("cases", [1, 3, 60])
@pytest.mark.parametrize(
    "image_targets", [TWO, FOUR, FINDINGS, NUMBERS], ids=lambda o: f"{len(o.names)} {o.kind}"
)
def test_as_the_slow_ones(image_targets: ImageLevelTargets, cases: int) -> None:
    for seed in range(3):
        outputs, truth = drawn(image_targets, cases, seed)
        found = image_level.measure(image_targets, outputs, truth)
        assert tuple(found) == image_level.METRICS[image_targets.kind]
        assert found == pytest.approx(slow(image_targets, outputs, truth), abs=1e-9)


def test_as_torchmetrics() -> None:
    outputs, truth = drawn(FOUR)
    logits, classes = torch.tensor(outputs), torch.tensor(truth[:, 0]).long()
    found = image_level.measure(FOUR, outputs, truth)
    assert found["auc"] == pytest.approx(float(torch_classes.multiclass_auroc(logits, classes, 4)), abs=1e-6)
    assert found["accuracy"] == pytest.approx(
        float(torch_classes.multiclass_accuracy(logits, classes, 4, average="micro"))
    )
    assert found["balanced_accuracy"] == pytest.approx(
        float(torch_classes.multiclass_accuracy(logits, classes, 4))
    )
    assert found["f1"] == pytest.approx(float(torch_classes.multiclass_f1_score(logits, classes, 4)))
    calibration = torch_classes.multiclass_calibration_error(logits, classes, 4, n_bins=15)
    assert found["calibration_error"] == pytest.approx(float(calibration), abs=1e-6)
    outputs, truth = drawn(FINDINGS)
    found = image_level.measure(FINDINGS, outputs, truth)
    logits, there = torch.tensor(outputs), torch.tensor(truth).long()
    assert found["auc"] == pytest.approx(float(torch_classes.multilabel_auroc(logits, there, 3)), abs=1e-6)
    assert found["f1"] == pytest.approx(float(torch_classes.multilabel_f1_score(logits, there, 3)))
    outputs, truth = drawn(NUMBERS)
    found, pair = image_level.measure(NUMBERS, outputs, truth), (torch.tensor(outputs), torch.tensor(truth))
    assert found["r2"] == pytest.approx(float(torchmetrics.r2_score(*pair)))
    assert found["pearson"] == pytest.approx(float(torchmetrics.pearson_corrcoef(*pair).mean()))
    assert found["mae"] == pytest.approx(float(torchmetrics.mean_absolute_error(*pair)))


def test_one_class_alone_has_no_auc() -> None:
    outputs, truth = drawn(TWO, 5)[0], np.ones((5, 1))
    found = image_level.measure(TWO, outputs, truth)
    assert found["auc"] is None and found["accuracy"] == found["balanced_accuracy"]
    assert "auc" not in image_level.intervals(TWO, outputs, truth) and "accuracy" in image_level.intervals(
        TWO, outputs, truth
    )
    assert image_level.measure(FINDINGS, drawn(FINDINGS, 5)[0], np.zeros((5, 3)))["auc"] is None


def test_constant_numbers_have_no_correlation() -> None:
    constant, varied = np.full((7, 2), 0.1), drawn(NUMBERS, 7)[1]
    found = image_level.measure(NUMBERS, constant, varied)
    assert found["pearson"] is None and found["r2"] is not None and found["r2"] < 0
    found = image_level.measure(NUMBERS, varied, constant)
    assert found["pearson"] is None and found["r2"] is None and found["mae"] is not None
    assert set(image_level.intervals(NUMBERS, varied, constant)) == {"mae", "rmse"}


@pytest.mark.parametrize("image_targets", [TWO, FINDINGS, NUMBERS], ids=lambda o: o.kind)
def test_no_case_or_numbers_that_are_none(image_targets: ImageLevelTargets) -> None:
    nothing = np.zeros((0, image_targets.num_outputs)), np.zeros((0, image_targets.num_values))
    outputs, truth = drawn(image_targets, 4)
    for pair in (nothing, (np.full_like(outputs, np.nan), truth)):
        assert set(image_level.measure(image_targets, *pair).values()) == {None}
        assert image_level.intervals(image_targets, *pair) == {}
        assert len(image_level.errors(image_targets, *pair)) == len(pair[1])
    assert image_level.intervals(image_targets, outputs[:1], truth[:1]) == {}


@pytest.mark.parametrize("image_targets", [FOUR, FINDINGS, NUMBERS], ids=lambda o: o.kind)
def test_intervals_are_those_of_cases_drawn_again(image_targets: ImageLevelTargets) -> None:
    """A second bootstrap, sample by sample, of cases and not of counts."""
    outputs, truth = drawn(image_targets, 80)
    rng = np.random.default_rng(7)
    samples = [slow(image_targets, outputs[i], truth[i]) for i in rng.integers(80, size=(300, 80))]
    found = image_level.intervals(image_targets, outputs, truth)
    assert (
        found
        == image_level.intervals(image_targets, outputs, truth)
        != image_level.intervals(image_targets, outputs, truth, seed=1)
    )
    for name, (low, high) in found.items():
        expected = np.percentile([sample[name] for sample in samples], [2.5, 97.5])
        width = expected[1] - expected[0]
        assert (low, high) == pytest.approx(tuple(expected), abs=0.2 * width), name
        assert (
            low <= image_level.measure(image_targets, outputs, truth)[name] <= high
            or name == "calibration_error"
        )


def test_intervals_cover_what_is_true() -> None:
    """The AUC of two normal distributions one standard deviation apart is 0.760."""
    hits = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        truth = (np.arange(100) % 2).astype(float)
        score = 1 / (1 + np.exp(-rng.normal(truth, 1)))
        low, high = image_level.intervals(TWO, np.stack([1 - score, score], 1), truth[:, None], 200)["auc"]
        hits.append(low <= 0.7602 <= high)
    assert 0.88 <= np.mean(hits) <= 0.99


def test_a_thousand_samples_take_no_time() -> None:
    outputs, truth = drawn(TWO, 624)
    start = time.perf_counter()
    image_level.intervals(TWO, outputs, truth)
    assert time.perf_counter() - start < 5


def test_per_name() -> None:
    outputs, truth = drawn(FOUR, 40)
    found = image_level.per_name(FOUR, outputs, truth)
    called = outputs.argmax(1)
    for index, name in enumerate(FOUR.names):
        there = truth[:, 0] == index
        assert found[name]["cases"] == there.sum()
        assert found[name]["auc"] == pytest.approx(reference.auc(outputs[:, index].tolist(), there.tolist()))
        assert found[name]["sensitivity"] == pytest.approx((called[there] == index).mean())
        assert found[name]["specificity"] == pytest.approx((called[~there] != index).mean())
        assert found[name]["precision"] == pytest.approx(there[called == index].mean())
    pair = drawn(NUMBERS)
    mae = [row["mae"] for row in image_level.per_name(NUMBERS, *pair).values()]
    assert np.mean(mae) == pytest.approx(image_level.measure(NUMBERS, *pair)["mae"])


def test_the_worst_case_is_the_one_most_wrong() -> None:
    found = image_level.errors(
        TWO, np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([[1.0], [1.0], [0.0]])
    )
    assert found == pytest.approx([0.9, 0.2, 0.4])
    assert image_level.errors(
        FINDINGS, np.array([[0.1, 0.8, 0.5]]), np.array([[0, 1, 1.0]])
    ) == pytest.approx([0.5])
    spread = np.array([[0.0, 0.0], [2.0, 20.0]])
    assert image_level.errors(NUMBERS, spread + [1, 0], spread) == pytest.approx([0.5, 0.5])


def test_two_sets_of_answers_to_the_same_cases() -> None:
    outputs, truth = drawn(TWO, 150)
    worse = (
        image_level.decided(TWO, outputs) * 0.2
        + outputs * 0.1
        + np.random.default_rng(1).dirichlet([1, 1], 150) * 0.7
    )
    found, back = (
        image_level.paired(TWO, outputs, worse, truth),
        image_level.paired(TWO, worse, outputs, truth),
    )
    ours, theirs = image_level.measure(TWO, outputs, truth), image_level.measure(TWO, worse, truth)
    for name, row in found.items():
        assert (row["value"], row["value_compare"]) == (ours[name], theirs[name])
        assert row["low"] <= row["difference"] <= row["high"] or name == "calibration_error"
        assert back[name]["difference"] == pytest.approx(-row["difference"]) and back[name][
            "low"
        ] == pytest.approx(-row["high"])
    assert (
        found["auc"]["difference"] > 0.1
        and found["auc"]["p"] == pytest.approx(2 / 1001)
        and found["auc"]["low"] > 0
    )
    same = image_level.paired(TWO, outputs, outputs, truth)["auc"]
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)
    alone = image_level.paired(TWO, outputs[:3], worse[:3], np.zeros((3, 1)))["auc"]
    assert set(alone.values()) == {None}
