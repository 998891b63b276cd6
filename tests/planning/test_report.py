"""medconv/planning/report.py: the table of a plan, and the hint where a patch shows little of the image."""

import re

import pytest
from helpers.plans import NNUNET, published, reason, single_case

from medconv.planning.limits import SIZES, PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.report import network_rows, table
from medconv.planning.spacing import median_shape, view_share
from medconv.planning.topology import Budget, Network


def test_the_table_has_every_value_with_its_reason():
    prostate = plan(
        published("prostate"),
        budget=Budget(10, "measured", "bf16-mixed", "blocks"),
        modalities=("MRI", "ADC"),
    )
    lines = table(prostate.rows).splitlines()
    assert max(map(len, lines)) <= 90
    rows = [line for line in lines if not line.startswith(" ")]
    assert [row.split()[0] for row in rows] == [
        *("size", "dimensions", "spacing", "patch", "batch", "stages"),
        *("strides", "kernels", "channels", "normalisation", "memory"),
    ]
    assert "2x2x1 (2), 2x2x2, 2x2x1 (3)" in rows[6] and "modality MRI, ADC" in rows[9]
    reasons = " ".join(" ".join(lines).split())
    assert "in bf16-mixed, activation_checkpointing=blocks; budget: " in reasons
    column = rows[0].index(prostate.rows[0][2])
    assert all(line[:column].isspace() and line[column] != " " for line in lines if line not in rows)


def test_a_small_patch_names_the_spacing_that_would_show_more():
    liver = plan(published("liver"), budget=NNUNET)
    assert "1.9 % of it: spacing_mm=[1.85,1.85,2.4] would show more" in reason(liver, "patch")
    many = plan(published("liver"), PlanOverrides(batch_size=9), NNUNET)
    assert "of it: a smaller batch_size or spacing_mm=[" in reason(many, "patch")
    assert "would show" not in reason(plan(published("prostate"), budget=NNUNET), "patch")


@pytest.mark.parametrize("patch_size", [None, (64, 64, 10)])
def test_the_spacing_that_would_show_more_shows_a_quarter(patch_size):
    """And leaves slices of 5 mm, all of which the patch sees, as thick as they are."""
    slices = single_case((400, 400, 10), (0.5, 0.5, 5.0))
    budget = Budget(0.5)
    text = reason(plan(slices, PlanOverrides(patch_size=patch_size), budget), "patch")
    (numbers,) = re.findall(r"spacing_mm=\[(.*)\] would show more", text)
    spacing = [float(mm) for mm in numbers.split(",")]
    assert spacing[0] == spacing[1] > 0.5 and spacing[2] == 5.0
    wider = plan(slices, PlanOverrides(patch_size=patch_size, spacing_mm=spacing), budget)
    assert view_share(wider.patch_size, median_shape(slices, wider.spacing_mm)) >= 0.25


def test_the_table_names_a_value_as_its_caller_does():
    names = {"spacing_mm": "data.spacing_mm", "max_stages": "plan.max_stages"}
    liver = plan(published("liver"), PlanOverrides(max_stages=2, names=names), NNUNET)
    assert "data.spacing_mm=[" in reason(liver, "patch") and "plan.max_stages" in reason(liver, "stages")


def test_the_reason_of_the_strides_fits_them():
    assert reason(plan(published("hippocampus"), budget=NNUNET), "strides").startswith("equal along all axes")
    for strides in (((2, 2, 2), (2, 2, 1)), ((2, 2, 1),)):
        stages = len(strides) + 1
        network = Network(strides, ((3, 3, 3),) * stages, (32,) * stages)
        rows = {row[0]: row[2] for row in network_rows(network, (32, 32, 8), (1, 1, 1), PlanOverrides())}
        assert rows["strides"].startswith("an axis is not halved")


def test_the_reasons_of_a_single_stage_fit_it():
    """A single stage has no strides, and kernels of 3 across thick slices, too."""
    thick = plan(single_case((32, 32, 8), (1, 1, 20)), PlanOverrides(max_stages=1))
    assert thick.strides == () and thick.kernel_sizes == ((3, 3, 3),)
    assert reason(thick, "strides") == "a single stage; the coarsest stage has 32 x 32 x 8 voxels"
    assert reason(thick, "kernels") == "3 along every axis in the last stage"
    assert reason(plan(single_case((32, 32, 8), (1, 1, 20))), "kernels").startswith("1 along axes")
    assert reason(plan(single_case((32, 32, 8), (1, 1, 1))), "kernels") == "voxels are near cubes"
    assert reason(plan(single_case((32, 32), (1, 1))), "kernels") == "voxels are near squares"


@pytest.mark.parametrize("size", SIZES)
def test_the_limit_of_the_channels_is_that_of_the_size(size):
    liver = plan(published("liver"), budget=Budget(10, size=size))
    assert max(liver.channels) == SIZES[size].max_channels[3]
    assert reason(liver, "channels") == "twice as many in each stage, up to the size's limit"


def test_an_axis_of_an_odd_patch_is_said_to_rest():
    """45 voxels of 1 mm are neither short nor longer than others, but cannot be halved."""
    planned = plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(patch_size=[45, 60, 16]))
    assert planned.strides == ((1, 2, 2), (1, 2, 2))
    assert "or where it is short or odd; the coarsest stage has 45 x 15 x 4 voxels" in reason(
        planned, "strides"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "halved until fewer than 4 voxels would remain"),
        ({"max_stages": 2}, "halved until fewer than 4 voxels would remain, up to max_stages"),
        ({"channels": [8, 16]}, "halved until fewer than 4 voxels would remain, up to channels"),
        ({"residual_blocks": [1, 1]}, "halved until fewer than 4 voxels would remain, up to residual_blocks"),
        ({"max_stages": 20}, "halved until fewer than 4 voxels would remain"),
        ({"patch_size": [50] * 3}, "halved until an odd number or fewer than 4 voxels would remain"),
        ({"strides": [2]}, "strides"),
    ],
)
def test_the_reason_of_the_stages_names_what_limits_them(values, expected):
    assert reason(plan(single_case((64, 64, 64), (1, 1, 1)), PlanOverrides(**values)), "stages") == expected
