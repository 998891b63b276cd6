"""What the tests of the benchmarks share."""

import pytest


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's logging would stay on for every test after these."""
    monkeypatch.setattr("medconv.commands.start_logging", lambda *_: None)
