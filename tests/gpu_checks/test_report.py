"""scripts/gpu_checks/report.py: the table on screen, and the page of claims with their results."""

import json

from gpu_checks import command, report
from gpu_checks.claims import GROUPS, Claim, Expect, of_group

CLAIM = Claim(
    "norm",
    "speed",
    "A norm is fast",
    10,
    (Expect("seconds", most=2.0, limit=lambda peaks: 0.5),),
    lambda s: {},
)


def test_the_page_of_claims_is_up_to_date():
    """Else: python scripts/gpu_check.py --write-docs"""
    claims = [claim for group in GROUPS for claim in of_group(group)]
    assert command.PAGE.read_text() == report.page(claims, command.RESULTS.glob("*.json"))


def test_the_readme_agrees_with_the_page_on_what_has_run_on_a_gpu():
    readme = " ".join((command.ROOT / "README.md").read_text().split())
    has_results = any(command.RESULTS.glob("*.json"))
    assert ("nothing has been measured on a GPU yet" in readme) == (not has_results)


def test_every_claim_has_a_limit_of_the_hardware_or_says_why_not():
    for claim in (claim for group in GROUPS for claim in of_group(group)):
        assert any(expect.limit for expect in claim.expects) != bool(claim.no_limit), claim.name


def test_a_line_has_what_was_expected_measured_and_possible():
    result = {"verdict": "missed", "figures": {"seconds": 3.0, "about": "fast"}}
    first, second = report.rows(CLAIM, result, "NVIDIA H100", tiny=False)
    words = [word.strip() for word in first.split("|")]
    assert words == ["norm", "seconds", "at most 2", "3", "0.5, 6.0x", "MISSED"]
    assert "fast" in second


def test_the_page_shows_the_last_result_of_a_claim(tmp_path):
    for name, begun, value in (("a", "2027-01-02T00:00", 1.0), ("b", "2027-01-01T00:00", 3.0)):
        part = {"verdict": "holds", "begun": begun, "figures": {"seconds": value}}
        content = {"machine": {"hardware": "NVIDIA H100"}, "parts": {"norm": part}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    page = report.page([CLAIM], tmp_path.glob("*.json"))
    row = "| `norm` | speed | A norm is fast | **holds**, NVIDIA H100, 2027-01-02: seconds 1, at most 2 |"
    assert row in page
    assert "| waits |" in report.page([CLAIM], [])
