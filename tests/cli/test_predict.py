"""Options of `medconv predict`."""

from medconv.cli.predict import parser


def test_options_have_the_usual_names() -> None:
    arguments = "--checkpoint a --trust-package x --trust-package y --input i --output o --save-probabilities"
    options = parser().parse_args([*arguments.split(), "--sw-batch-size", "3"])
    assert options.trust_package == ["x", "y"] and options.save_probabilities and options.sw_batch_size == 3


def test_checkpoints_may_be_repeated() -> None:
    arguments = "--checkpoint a b --checkpoint c --input i --output o"
    options = parser().parse_args(arguments.split())
    assert [path.name for path in options.checkpoint] == list("abc")
