"""medconv/config/template_words.py: words of another template, and what does the same here."""

import re

import pytest

from medconv.config.composition_errors import _no_key, _no_option
from medconv.config.schema import conf_dir
from medconv.config.template_words import _KEYS, _OPTIONS, same_here
from medconv.config.unknown_keys import _known_names, unknown_key


def test_the_words_that_are_recommended_exist() -> None:
    """Each GROUP=OPTION and each key of the sentences."""
    text = " ".join([*_KEYS.values(), *_OPTIONS.values()])
    options = re.findall(r"\b(logger|early_stopping|debug)=(\w+)", text)
    assert len(options) >= 4
    assert all((conf_dir() / group / f"{name}.yaml").is_file() for group, name in options)
    keys = re.findall(r"\b(?:run|data|trainer)\.\w+", text)
    assert len(keys) >= 5 and set(keys) <= set(_known_names())


def test_a_word_is_no_key_or_option_of_ours() -> None:
    assert not {key for key in _KEYS if key in _known_names()}
    assert not [word for word in _OPTIONS if (conf_dir() / f"{word.replace('=', '/')}.yaml").is_file()]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_no_key("task_name", []), "there is no key task_name; run.name=NAME names the run's folder"),
        (_no_key("extras.x", []), "there is no key extras.x; --cfg job prints the config"),
        (unknown_key("paths"), "there is no key paths; data.root is the dataset's folder"),
        (
            _no_option("logger", "many_loggers", ["wandb"]),
            "there is no logger=many_loggers; logger=wandb and",
        ),
        (_no_option("debug", "fdr", ["limit"]), "there is no debug=fdr; debug=default is the shortest run"),
    ],
)
def test_an_error_names_what_does_the_same(error: object, expected: str) -> None:
    assert str(error).startswith(expected)
    assert same_here("data.root") is None
