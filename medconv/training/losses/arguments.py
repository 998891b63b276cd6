"""What the losses check about their arguments, and the error that says so."""

import math
from typing import Any


class LossArgumentError(ValueError):
    """An argument of a loss does not fit the outputs that the loss is called with; the message names it."""


def is_weight(value: Any) -> bool:
    """Whether a value is a finite number of 0 or more; neither a boolean nor a string."""
    return type(value) in (int, float) and 0 <= value < math.inf
