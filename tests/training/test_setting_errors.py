"""medconv/training/setting_errors.py: errors of arguments name the config key."""

import pytest

from medconv.config import ConfigError
from medconv.training.setting_errors import naming_key


def test_an_error_of_an_argument_names_the_key() -> None:
    message = r"^task\.mixup: alpha must be 0 or more, got -1$"
    with pytest.raises(ConfigError, match=message), naming_key("task.mixup"):
        raise ValueError("alpha must be 0 or more, got -1")


def test_other_errors_are_bugs_and_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"^no number$"), naming_key("task.mixup"):
        raise TypeError("no number")
