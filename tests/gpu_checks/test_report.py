"""scripts/gpu_checks/report.py, failures.py and traces.py: the table, the page, errors and waits."""

import json

import pytest
import torch

from gpu_checks import command, report
from gpu_checks.claims import GROUPS, Claim, Expect, of_group
from gpu_checks.failures import failure
from gpu_checks.traces import waits

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


def test_the_tensors_are_those_of_the_first_error():
    def product():
        image, weight = torch.zeros(2, 3), torch.zeros(5)
        try:
            print(image @ weight)
        except RuntimeError as error:
            raise ValueError("bad settings") from error

    with pytest.raises(ValueError, match="bad settings") as caught:
        product()
    text = failure(caught.value)
    assert "RuntimeError" in text and "ValueError: bad settings" in text
    assert text.endswith("in product: image: 2x3 float32 cpu; weight: 5 float32 cpu")


def event(name, start, seconds, thread=1):
    return {"ph": "X", "name": name, "ts": start, "dur": seconds, "tid": thread}


def test_waits_inside_steps_are_counted_with_what_called_them(tmp_path):
    events = [
        event("ProfilerStep#1", 0, 100),
        event("ProfilerStep#2", 100, 100),
        event("aten::item", 10, 20),
        event("aten::_local_scalar_dense", 11, 15),
        event("cudaStreamSynchronize", 12, 5),
        event("cudaEventSynchronize", 20, 5),
        event("aten::other", 12, 5, thread=2),
        event("cudaDeviceSynchronize", 250, 5),  # after the steps
        {"ph": "i", "name": "cudaStreamSynchronize", "ts": 20},
    ]
    (tmp_path / "one.pt.trace.json").write_text(json.dumps({"traceEvents": events}))
    found = waits(tmp_path)
    assert found["waits in a step"] == 0.5 and found["steps in the trace"] == 2
    assert found["where"] == "aten::_local_scalar_dense in aten::item (1)"
