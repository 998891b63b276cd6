"""How a config key is declared: its type, the values that it takes and one line of text, in one place.

Checks, the site's page of keys and the JSON schema for editors are made of these declarations.
"""

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, get_type_hints

from omegaconf import MISSING as OMITTED

from medconv.config.values import ConfigError, as_text, duration_seconds, enumeration, fits, in_words, members

Node = dict[str, Any]  # a `_target_` and its arguments, or several by name; for `build` alone
_METADATA = "key"  # where a dataclass field holds its declaration


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The values that a key takes beside those of its type; each number in a list or mapping is checked.

    Args:
        ge, gt, le, lt: greater or equal, greater than, less or equal, less than; `lt=math.inf`: finite.
        choices: the only words or numbers.
        share: up to 1 a share, above it a whole number, as Lightning reads batches.
        duration: the key takes a duration, as `values.duration_seconds` reads it; bounds are of its seconds.
        path: the key takes a path on this machine, not an address such as s3://bucket.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str | int, ...] = ()
    share: bool = False
    duration: bool = False
    path: bool = False

    def allow(self, value: Any) -> bool:
        """Whether all of a value lies inside. Null does: only the type says whether a key takes it."""
        if value is None:
            return True
        leaves = list(_leaves(value))
        if self.choices:
            # YAML reads trainer.precision=32 as a number, Lightning takes it as a word, too
            allowed = {str(choice) for choice in self.choices}
            return all(str(leaf) in allowed for leaf in leaves)
        # true and false are numbers in Python, but not here
        numbers = [leaf for leaf in leaves if type(leaf) in (int, float)]
        # written so that nan, which compares false with all, lies outside of any bounds
        return all(
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
            and (not self.share or number <= 1 or number % 1 == 0)
            for number in numbers
        )

    def in_words(self) -> str:
        """The bounds for messages, such as `at least 0 and below 1`; empty: there are none."""
        bounds = [
            ("at least {:g}", self.ge),
            ("more than {:g}", self.gt),
            ("at most {:.10g}", self.le),
            ("finite" if self.lt == math.inf else "below {:g}", self.lt),
            ("whole above 1", self.share or None),
        ]
        return " and ".join(words.format(bound) for words, bound in bounds if bound is not None)


class Key(NamedTuple):
    """A declared key.

    Args:
        name: with its group, such as `trainer.max_steps`.
        kind: its type, as an annotation.
        default: `omegaconf.MISSING` if it has none.
    """

    name: str
    kind: Any
    limits: Limits
    text: str
    default: Any

    def has_default(self) -> bool:
        return self.default is not MISSING and self.default != OMITTED

    def expected(self) -> str:
        """The values that this key takes, for messages."""
        accepts_list = any(getattr(member, "__origin__", None) is list for member in members(self.kind))
        accepts_null = fits(None, self.kind)
        if self.limits.choices:
            words = [str(choice) for choice in self.limits.choices]
            words += ["null"] if accepts_null else []
            return enumeration(words) + (", or a list of these" if accepts_list else "")
        bounds = self.limits.in_words()
        return f"numbers, each {bounds}" if bounds and accepts_list else bounds

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, as a message that names the key; None: nothing."""
        if value == OMITTED:  # the run fills it in
            return None
        if not fits(value, self.kind):
            expected = self.expected() if self.limits.choices else in_words(self.kind)
            return f"{self.name} must be {expected}, got {as_text(value)}"
        checked = value
        if self.limits.duration and value is not None:
            try:
                checked = duration_seconds(value, self.name)
            except ConfigError as error:
                return str(error)
        scheme = re.match("[A-Za-z][A-Za-z0-9+.-]+://", value) if self.limits.path and value else None
        if scheme:
            return (
                f"{self.name}={value}: needs a path on this machine, not an address; mount {scheme[0]} as a "
                "folder or copy it (docs/scale.md, Data elsewhere)"
            )
        if self.limits.allow(checked):
            return None
        return f"{self.name} must be {self.expected()}, got {as_text(value)}"


def key(default: Any, text: str, *, accepts: Any = None, **limits: Any) -> Any:
    """A field of a config dataclass, declared as a key.

    Args:
        default: `omegaconf.MISSING` if an option or the run gives the value.
        text: what the key is for, on one line.
        accepts: the type, where OmegaConf has no name for it and the field is annotated `Any`.
        limits: arguments of `Limits`.
    """
    metadata = {_METADATA: (Limits(**limits), text, accepts)}
    # each config gets a list of its own
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared_keys(config: type, prefix: str = "", **groups: type) -> Iterator[Key]:
    """The keys of a config dataclass and of its groups, which are dataclasses too, in their order.

    A field that is not declared by `key` takes what its type takes.
    Args:
        prefix: of the names.
        groups: the dataclass of a group, instead of the one that it is annotated with.
    """
    hints = get_type_hints(config)
    for entry in fields(config):
        limits, text, accepts = entry.metadata.get(_METADATA, (Limits(), "", None))
        kind = hints[entry.name] if accepts is None else accepts
        group: Any = groups.get(entry.name, kind)
        # a group is a dataclass itself; a node with a `_target_` is one key
        if isinstance(group, type) and is_dataclass(group):
            yield from declared_keys(group, f"{prefix}{entry.name}.")
            continue
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        yield Key(f"{prefix}{entry.name}", kind, limits, text, default)


def _leaves(value: Any) -> Iterator[Any]:
    """The numbers and words in nested lists and mappings."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif value is not None:
        yield value
