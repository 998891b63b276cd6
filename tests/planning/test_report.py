"""medconv/planning/report.py: the table of a plan, and the hint where a patch shows little of the image."""

from helpers.plans import NNUNET, published, reason

from medconv.planning.memory_model import Budget
from medconv.planning.overrides import PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.report import network_rows, table
from medconv.planning.topology import Network


def test_the_table_has_every_value_with_its_reason() -> None:
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
    assert "in bf16-mixed, activation_checkpointing=blocks; the budget: measured" in reasons
    column = rows[0].index(prostate.rows[0][2])
    assert all(line[:column].isspace() and line[column] != " " for line in lines if line not in rows)


def test_a_small_patch_names_the_spacing_that_would_show_more() -> None:
    liver = plan(published("liver"), budget=NNUNET)
    assert "1.9 % of it: data.spacing_mm=[1.8,1.8,2.4] would show more" in reason(liver, "patch")
    assert "would show" not in reason(plan(published("prostate"), budget=NNUNET), "patch")


def test_the_reason_of_the_strides_fits_them() -> None:
    assert reason(plan(published("hippocampus"), budget=NNUNET), "strides").startswith("all axes alike")
    for strides in (((2, 2, 2), (2, 2, 1)), ((2, 2, 1),)):
        stages = len(strides) + 1
        network = Network(strides, ((3, 3, 3),) * stages, (32,) * stages)
        rows = {row[0]: row[2] for row in network_rows(network, (32, 32, 8), PlanOverrides())}
        assert rows["strides"].startswith("an axis rests")
