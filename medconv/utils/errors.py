"""Errors of libraries, which raise anything in any form, as errors of one line for users."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained(what: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn these errors of the block, by default every `Exception`, into a ValueError: `what (reason)`."""
    caught = errors or Exception
    try:
        yield
    except caught as error:
        raise ValueError(f"{what} ({reason(error)})") from error


def reason(error: BaseException) -> str:
    """An error on one line; of the system's errors without number and path."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def with_class(error: BaseException) -> str:
    """Class and first line of another package's error."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line:.200}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """Of an error that goes on with code or a traceback."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0]}" if first.endswith(":") and others else first  # as Hydra breaks its own
