"""medconv/features/image_level/regression.py: numbers are standardised for the loss, and networks return units."""

import numpy as np
import pytest
import torch
from torch import nn

from medconv.features.image_level.regression import RegressionTargets
from medconv.targets import Targets
from medconv.training.losses.fit import FittedLoss


def test_means_and_spreads_come_from_the_training_cases():
    targets = RegressionTargets(("age", "sex")).fitted(np.array([[50.0, 1.0], [70.0, 1.0]]))
    assert (targets.means, targets.stds) == ((60.0, 1.0), (10.0, 1.0))  # a constant keeps its scale
    assert Targets.from_plain(targets.plain()) == targets


def test_losses_compare_standardised_numbers_and_networks_return_units():
    targets = RegressionTargets(("age",), (60.0,), (10.0,))
    outputs, label = torch.tensor([[80.0]]), torch.tensor([[50.0]])
    assert float(targets.compare(nn.L1Loss(), outputs, targets.encode(label))) == pytest.approx(3)
    network = targets.finish(nn.Flatten())
    assert network(torch.tensor([[2.0]])).tolist() == [[80.0]]


def test_constants_made_in_inference_serve_training():
    targets = RegressionTargets(("length",), (1.0,), (2.0,))
    with torch.inference_mode():
        targets.encode(torch.ones(1, 1))
    outputs = torch.ones(1, 1, requires_grad=True)
    targets.compare(nn.MSELoss(), outputs, targets.encode(torch.zeros(1, 1))).backward()
    assert outputs.grad is not None


def test_errors_are_in_standard_deviations_of_the_training_cases():
    outputs, truth = np.array([[1.0], [5.0]]), np.array([[0.0], [4.0]])
    assert RegressionTargets(("a",), (0.0,), (4.0,)).errors(outputs, truth).tolist() == [0.25, 0.25]
    assert RegressionTargets(("a",)).errors(outputs, truth).tolist() == [0.5, 0.5]  # of the truth


@pytest.mark.parametrize(
    ("means", "stds"),
    [([1, 2], [1, 2]), ([5], []), ([], [1]), ([float("nan")], [1]), ([1], [0]), ([None], [1]), (5, [1])],
)
def test_means_and_spreads_of_a_file_are_checked(means, stds):
    with pytest.raises(ValueError, match="a mean and a positive std for each name|expected a list"):
        Targets.from_plain({"kind": "regression", "names": ["a"], "means": means, "stds": stds})


def test_without_means_and_spreads_numbers_stay_as_they_are():
    assert RegressionTargets(("a",)).finish(nn.Flatten())(torch.tensor([[2.0]])).tolist() == [[2.0]]


def test_equal_labels_have_no_spread_from_rounding():
    assert RegressionTargets(("a",)).fitted(np.full((3, 1), 0.1)).stds == (1.0,)


@pytest.mark.parametrize(
    ("numbers", "value"),
    [
        ([20, 55, 90, -999, -999], -999),
        ([20, 55, 90, 9999], 9999),
        ([0.1, 0.5, 2.5, -1], -1),
        ([20, 55, 90, 99], None),  # an age
        ([-2, -1, 0, 1, 2], None),
        ([-999, -998, -1], None),
    ],
)
def test_a_number_that_stands_for_none_is_named(numbers, value):
    values = np.array(numbers, float)[:, None]
    warning = RegressionTargets(("age",)).check_examples(values, "training")
    if value is None:
        assert warning is None
    else:
        assert warning is not None
        assert warning.startswith(
            f"{numbers.count(value)} training cases have age {value}, all others are from "
        )


def test_a_number_that_never_changes_is_named():
    targets = RegressionTargets(("age", "size"))
    assert targets.check_examples(np.array([[1.0, 2.0], [3.0, 2.0]]), "training") == (
        "all training cases have the same size"
    )
    assert targets.check_examples(np.array([[1.0, 2.0], [3.0, 4.0]]), "training") is None


def fitted(loss, targets, spatial_dims=3):
    return FittedLoss(loss, targets, spatial_dims)
