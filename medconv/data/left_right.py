"""Left and right: their axis, classes that swap under mirroring, and warnings for names that look so."""

import difflib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from medconv.targets.base import Targets
from medconv.utils.errors import ArgumentError

_LEFT = {"right": "left", "r": "l", "rh": "lh", "rt": "lt"}  # words for right to those for left
# Words of a name: runs of letters, cut at `left` and `right`, so that HippocampusLeft has two
_WORD = re.compile(r"left|right|[a-z]+?(?=left|right)|[a-z]+|\d+")

log = logging.getLogger(__name__)


def left_right_axis(slice_axis: int | None) -> int | None:
    """The axis of the network input from left to right: the first; None for sagittal slices."""
    return None if slice_axis == 0 else 0


def flip_label_pairs(
    pairs: Any, class_names: Sequence[str], swappable: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    """The numbers of pairs of classes or points, which a mirror along the left-right axis exchanges.

    Args:
        pairs: a list of pairs of names.
        class_names: by number, that of the network's output; of label maps also the label value.
        swappable: all of these but the background.

    Raises:
        ArgumentError: not a pair, an unknown name, the background, or a name in two pairs.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise _not_pairs(pairs)
    names = list(class_names)
    values: list[tuple[int, int]] = []
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 or pair[0] == pair[1]:
            raise _not_pairs(pairs)
        for name in pair:
            _check_swappable(name, swappable)
        values.append((names.index(pair[0]), names.index(pair[1])))
    counts = Counter(value for pair in values for value in pair)
    repeated = [names[value] for value, count in counts.items() if count > 1]
    if repeated:
        raise ArgumentError("flip_label_pairs", f": a name has one partner, {', '.join(repeated)} has more")
    return tuple(values)


def _not_pairs(pairs: Any) -> ArgumentError:
    expected = "pairs of two different names, such as [[left, right]]"
    return ArgumentError("flip_label_pairs", f" needs {expected}, got {pairs}")


def _check_swappable(name: Any, swappable: Sequence[str]) -> None:
    """Raises: ArgumentError: none of these names; suggests the nearest one."""
    if name in swappable:
        return
    nearest = difflib.get_close_matches(str(name), swappable, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the names are {', '.join(swappable)}"
    raise ArgumentError("flip_label_pairs", f": there is no {name} to swap; {hint}")


def lookalikes(class_names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of classes whose names differ only in left and right."""
    # The words of each name in lower case, with right replaced by left
    words = {name: [_LEFT.get(word, word) for word in _WORD.findall(name.lower())] for name in class_names}
    return [(a, b) for a, b in combinations(class_names, 2) if a != b and words[a] == words[b]]


def warn_of_lookalikes(
    targets: Targets,
    class_names: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    left_right_axis: int | None,
    mirrored_axes: Sequence[int],
    equivariant_axes: Sequence[int],
) -> None:
    """Warn if augmentation or the network swaps left and right while class names look like pairs.

    It need not be asked if neither mirrors along `left_right_axis`.

    Args:
        pairs: label values that augmentation swaps when it mirrors.
        left_right_axis: axis of the array from left to right; None: unknown.
        mirrored_axes: axes along which augmentation mirrors.
        equivariant_axes: axes along which the network maps a mirrored image to the mirrored output.
    """
    names = _unpaired_lookalikes(targets, class_names, pairs)
    if not names:
        return
    if left_right_axis in equivariant_axes:
        log.warning(
            "the network is equivariant along axis %d, from left to right, so it cannot tell %s",
            left_right_axis,
            ", ".join(f"{a} from {b}" for a, b in names),
        )
    elif left_right_axis in mirrored_axes:
        _warn_of_mirroring(targets, names, mirrored_axes)


def _warn_of_mirroring(
    targets: Targets, names: Sequence[tuple[str, str]], mirrored_axes: Sequence[int]
) -> None:
    if targets.can_swap_labels:
        log.warning(
            "augmentation: mirror_axes=%s swaps left and right but no labels; "
            "flip_label_pairs=[%s] would swap them",
            list(mirrored_axes),
            ",".join(f"[{a},{b}]" for a, b in names),
        )
    else:
        log.warning(
            "augmentation: mirror_axes=%s swaps left and right but no %s: %s; mirror along other axes",
            list(mirrored_axes),
            "regions" if targets.per_voxel else "labels",
            ", ".join(f"{a} and {b}" for a, b in names),
        )


def _unpaired_lookalikes(
    targets: Targets, class_names: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> list[tuple[str, str]]:
    """Names of classes and of targets that look like pairs and are not in `pairs`."""
    paired = {class_names[value] for pair in pairs for value in pair}
    names: list[tuple[str, str]] = []
    for a, b in lookalikes([name for name in class_names if name not in paired]):
        # Classes of one region may be swapped: the network does not tell them apart
        if targets.distinguishes(class_names.index(a), class_names.index(b)):
            names.append((a, b))
    for a, b in lookalikes([name for name in targets.names if name not in paired]):
        if (a, b) not in names:
            names.append((a, b))
    return names
