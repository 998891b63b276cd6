"""Errors about arguments become errors about flags."""

from argparse import Namespace

import pytest

from medconv.cli.parsers import arguments_as_flags, flag_of
from medconv.utils.errors import ArgumentError


def test_the_flag_of_an_option_stands_in_the_place_of_the_argument():
    assert flag_of("mirror_axes") == "--mirror-axes"
    with (
        pytest.raises(ValueError, match="^--mirror-axes=.5. is too large$"),
        arguments_as_flags(Namespace(mirror_axes=[5])),
    ):
        raise ArgumentError("mirror_axes", "=[5] is too large")


def test_an_argument_that_is_no_option_keeps_its_name():
    with (
        pytest.raises(ArgumentError, match=r"^task\.overlap is 2$"),
        arguments_as_flags(Namespace(overlap=1)),
    ):
        raise ArgumentError("task.overlap", " is 2")
