"""Options of `medconv find-postprocessing`."""

from medconv.cli import find_postprocessing


def test_select_takes_overrides_as_text() -> None:
    arguments = "--runs r --select seed=1"
    assert find_postprocessing.parser().parse_args(arguments.split()).select == "seed=1"
