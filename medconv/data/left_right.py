"""Left and right: pairs of classes that swap under mirroring, and warnings for names that look like pairs."""

import difflib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from medconv.config import ConfigError
from medconv.targets.base import Targets

_LEFT = {"right": "left", "r": "l", "rh": "lh", "rt": "lt"}
log = logging.getLogger(__name__)


def flip_label_pairs(pairs: Any, class_names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """`data.flip_label_pairs`, a list of pairs of names or null, as class numbers.

    Raises: ConfigError: not a pair, an unknown class, the background, or a class in two pairs.
    """
    names = list(class_names)
    numbers: list[tuple[int, int]] = []
    for pair in pairs or () if isinstance(pairs, Sequence | None) and not isinstance(pairs, str) else [pairs]:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 or pair[0] == pair[1]:
            what = "pairs of two different classes, such as [[left, right]]"
            raise ConfigError(f"data.flip_label_pairs needs {what}, got {pairs}")
        for name in pair:
            if name not in names[1:]:
                near = difflib.get_close_matches(str(name), names[1:], n=1)
                hint = f"did you mean {near[0]}?" if near else f"the classes are {', '.join(names[1:])}"
                raise ConfigError(f"data.flip_label_pairs: {name} is not a foreground class; {hint}")
        numbers.append((names.index(pair[0]), names.index(pair[1])))
    flat = [number for pair in numbers for number in pair]
    if repeated := [names[n] for n, count in Counter(flat).items() if count > 1]:
        raise ConfigError(f"data.flip_label_pairs: a class has one partner, {', '.join(repeated)} has more")
    return tuple(numbers)


def lookalikes(class_names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of classes whose names differ only in left and right."""
    return [(a, b) for a, b in combinations(class_names, 2) if a != b and _unsided(a) == _unsided(b)]


def check_equivariance(
    pairs: Sequence[tuple[int, int]], class_names: Sequence[str], axis: int | None, equivariant: Sequence[int]
) -> None:
    """Args: pairs: of `data.flip_label_pairs`. axis: from left to right.

    Raises: ConfigError: the network is equivariant along the axis that distinguishes the pairs.
    """
    if pairs and axis in equivariant:
        a, b = (class_names[number] for number in pairs[0])
        raise ConfigError(
            f"conv=mirror along axis {axis}, from left to right, makes a network that gives a mirrored "
            f"image the mirrored labels, and so cannot tell {a} from {b} (data.flip_label_pairs); take "
            "other conv.axes, or another conv"
        )


def warn_of_lookalikes(
    targets: Targets,
    class_names: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    axis: int | None,
    mirrored: Sequence[int],
    equivariant: Sequence[int],
) -> None:
    """Warn if augmentation or the network swaps left and right while class names look like pairs.

    Args: pairs: of `data.flip_label_pairs`. axis: from left to right.
    """
    paired = {class_names[number] for pair in pairs for number in pair}
    alike = [
        (a, b)
        for a, b in lookalikes([name for name in class_names if name not in paired])
        if targets.distinguishes(class_names.index(a), class_names.index(b))
    ]
    alike += [
        names for names in lookalikes([n for n in targets.names if n not in paired]) if names not in alike
    ]
    if not alike or axis not in (*mirrored, *equivariant):
        return
    if axis in equivariant:
        named = ", ".join(f"{a} from {b}" for a, b in alike)
        log.warning(
            "conv=mirror along axis %d, from left to right, makes a network that cannot tell %s", axis, named
        )
    elif targets.can_swap_labels:
        named = ",".join(f"[{a},{b}]" for a, b in alike)
        advice = (
            "augmentation.mirror_axes=%s swaps left and right but no labels; data.flip_label_pairs=[%s] would"
        )
        log.warning(advice, list(mirrored), named)
    else:
        named = ", ".join(f"{a} and {b}" for a, b in alike)
        what = "regions" if targets.per_voxel else "labels"
        advice = "augmentation.mirror_axes=%s swaps left and right but no %s: %s; mirror along other axes"
        log.warning(advice, list(mirrored), what, named)


def _unsided(name: str) -> tuple[str, ...]:
    """The words of a name in lower case, right turned into left."""
    words = re.findall(r"left|right|[a-z]+?(?=left|right)|[a-z]+|\d+", name.lower())
    return tuple(_LEFT.get(word, word) for word in words)
