"""Options of `medconv evaluate`."""

from medconv.cli import evaluate


def test_split_selects_a_part_of_the_table() -> None:
    arguments = "--predictions p --output o --split val"
    assert evaluate.parser().parse_args(arguments.split()).split == "val"
