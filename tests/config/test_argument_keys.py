"""medconv/config/argument_keys.py: keys in the place of arguments in errors."""

import pytest

from medconv.config import ConfigError, arguments_as_keys
from medconv.utils.errors import Argument, ArgumentError


@arguments_as_keys("data", "plan", divisible_by="model.divisible_by")
def fail(argument: str, *problem: str) -> None:
    raise ArgumentError(argument, *problem)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (["num_workers", "=-1"], "data.num_workers=-1"),
        (["max_stages", " is 0"], "plan.max_stages is 0"),
        (["divisible_by", "=x"], "model.divisible_by=x"),
        (["images.t1", ": no file"], "data.images.t1: no file"),
        (["fold", " needs ", Argument("num_folds"), ", fold"], "data.fold needs data.num_folds, fold"),
    ],
)
def test_keys_take_the_place_of_arguments(problem: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        fail(*problem)
    assert str(raised.value) == message


def test_an_argument_without_a_key_keeps_its_error() -> None:
    with pytest.raises(ArgumentError, match=r"^overlap=1$"):
        fail("overlap", "=1")
