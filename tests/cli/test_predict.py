"""Options of `medconv predict`."""

from medconv.cli.predict import parser


def test_options_have_the_usual_names() -> None:
    arguments = "--checkpoint a --trust-package x --trust-package y --input i --output o --save-probabilities"
    options = parser().parse_args([*arguments.split(), "--sw-batch-size", "3", "--exported-model", "m"])
    assert options.trust_package == ["x", "y"] and options.save_probabilities and options.sw_batch_size == 3
    assert [path.name for path in options.exported_model] == ["m"]


def test_checkpoints_and_exported_models_may_be_repeated() -> None:
    arguments = "--checkpoint a b --checkpoint c --exported-model d --exported-model e --input i --output o"
    options = parser().parse_args(arguments.split())
    assert [path.name for path in (*options.checkpoint, *options.exported_model)] == list("abcde")
