"""medconv/features/postprocessing/decision.py: the reason of a verdict, and the table."""

from dataclasses import replace

import pytest

from medconv.features.postprocessing.decision import Decision, Verdict, table
from medconv.features.postprocessing.steps import FOREGROUND, Step

HELPFUL = Verdict(
    step=Step("keep_largest", FOREGROUND),
    cases=9,
    changed=7,
    before=0.8,
    after=0.85,
    low=0.02,
    high=0.08,
    p=0.01,
    gain=0.05,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accepted": True}, "kept"),
        ({"changed": 0}, "no: changes nothing"),
        ({"after": 0.8}, "no: does not help"),
        ({"worse": ("liver", "spleen")}, "no: harms liver, spleen"),
        ({"p": 0.0734}, "no: could be chance (p = 0.073)"),
    ],
)
def test_a_verdict_says_why(changes, reason):
    verdict = replace(HELPFUL, **changes)
    assert verdict.reason == reason


def test_a_step_helps_if_it_is_better_significant_and_harms_no_class():
    assert HELPFUL.helps
    for changes in ({"after": 0.8}, {"low": -0.01}, {"low": None}, {"p": 0.06}, {"worse": ("liver",)}):
        assert not replace(HELPFUL, **changes).helps


def test_the_table_has_accepted_steps_first():
    undefined = replace(HELPFUL, low=None, high=None)
    accepted = replace(HELPFUL, accepted=True)
    lines = table(Decision((accepted,), (undefined,), before={}, after={})).splitlines()
    assert lines[0].split()[:3] == ["operation", "label", "changed"]
    assert "whole foreground" in lines[1] and "+0.0200 to +0.0800" in lines[1] and lines[1].endswith("kept")
    assert " +0.0500  - " in lines[2]
