"""medconv/config/python_values.py: what Hydra reads is the value that was given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from medconv.config import ConfigError
from medconv.config.python_values import as_override


def read(override: str) -> tuple[str, Any]:
    """Key and value, as Hydra reads them."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed.key_or_group, parsed.value()


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -3, 1e-05, 0.25, float("inf")),
        *("segresnet", "mine.net.Net", "null", "True", "nan", "12", "1e3", "00:00:01:30", ""),
        *("a path, with (odd) = characters", "it's", 'a "quote"', "ends\\", "Größe", "{id}_t1", "a#b"),
        *([1, 2.5], [], ["a b", None, [True]], {"a": 1, "b c": ["x,y"], "siteA_*": 2.0}, {}),
    ],
)
def test_a_value_stays_as_it_is(value: Any) -> None:
    assert read(as_override("data__key", value)) == ("data.key", value)


def test_paths_tuples_and_numbers_of_numpy_become_plain_values() -> None:
    assert read(as_override("a", Path("/data/my images"))) == ("a", "/data/my images")
    assert read(as_override("a", (1, 2))) == ("a", [1, 2])
    assert read(as_override("a", np.float32(0.5))) == ("a", 0.5)
    assert read(as_override("a", np.int64(3))) == ("a", 3)
    assert read(as_override("a", "~/data")) == ("a", str(Path("~/data").expanduser()))


def test_two_underscores_are_a_dot() -> None:
    assert as_override("model___target_", "mine.Net") == "model._target_=mine.Net"
    assert as_override("trainer__max_steps", 10) == "trainer.max_steps=10"


def test_another_type_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^data\.root: expected None, bool, .* got object"):
        as_override("data__root", object())
