"""Errors of libraries, which raise anything in any form, as errors of one line for users."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Argument(str):
    """The name of another argument, inside the message of an `ArgumentError`."""

    __slots__ = ()


class ArgumentError(ValueError):
    """An argument has a value that it cannot have.

    The command line puts flags in the place of arguments, and the config puts keys.

    Args:
        argument: its name as the function spells it, such as `mirror_axes`; the message begins with it.
        problem: the rest of the message, such as ` must be at least 1, got 0`, in one or more pieces; pieces
            that are an `Argument` name further arguments.
    """

    def __init__(self, argument: str, *problem: str) -> None:
        super().__init__("".join([argument, *problem]))
        self.argument = argument
        self.pieces = problem

    def renamed(self, name_of: Callable[[str], str]) -> str:
        """The message with other names. Args: name_of: argument to the name in its place, such as a flag."""
        pieces = [name_of(piece) if isinstance(piece, Argument) else piece for piece in self.pieces]
        return "".join([name_of(self.argument), *pieces])


@contextmanager
def explained(problem: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn these errors of the block, by default every `Exception`, into a ValueError: `problem (reason)`."""
    caught = errors or Exception
    try:
        yield
    except caught as error:
        raise ValueError(f"{problem} ({reason(error)})") from error


def reason(error: BaseException) -> str:
    """An error on one line; an error of the operating system without its number and path.

    A link that leads nowhere is named: the system says both that it exists and that it does not.
    """
    name = getattr(error, "filename", None)
    if isinstance(name, (str, bytes)):
        path = Path(os.fsdecode(name))
        for link in (path, *path.parents):
            if os.path.islink(link) and not os.path.exists(link):  # noqa: PTH110, PTH114 - any text
                place = "" if link == path else f"{link} is "
                return f"{place}a link to {os.readlink(link)}, which does not exist"  # noqa: PTH115
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def with_class(error: BaseException) -> str:
    """Class and first line of another package's error."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else ""
    return f"{type(error).__name__}: {line:.200}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """The first line of an error that goes on with code or a traceback."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    # Hydra breaks its own messages after a colon.
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1]}"
    return lines[0]
