"""Label values of files and of their dataset; masks of 0 and one high value, such as 255, for one class.

What a value means belongs to the dataset, not to a file: 0 and 128 in one mask, 0 and 255 in another may be
two classes, and 105 may be the class of that number.
"""

from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from medconv.data.io.raster import MIN_SINGLE_VALUE, is_picture, read_mask

Relabel = tuple[tuple[int, int], ...]  # pairs of value in the file and label value, see `Case.relabel`
_NUM_MASKS_READ = 20  # masks with foreground; those after them are checked when they are read


def relabel_of(masks: Iterable[Path | None], num_classes: int | None = None) -> Relabel | None:
    """How the masks of a dataset are read: 0 and 255, for example, as 0 and 1; None: as they are.

    Args:
        masks: label maps of any format; None where a case has none.
        num_classes: with the background; None: not known.

    Raises:
        ValueError: one mask holds 0 and one value of 100 or more, another holds other values.
    """
    if num_classes is not None and num_classes > 2:
        return None
    first_path: Path | None = None
    first_values: tuple[int, ...] = ()
    for path, values in islice(_foreground_values(masks), _NUM_MASKS_READ):
        if first_path is None:
            first_path = path
            first_values = values
        elif values != first_values and (_is_high(values) or _is_high(first_values)):
            raise ValueError(
                f"{first_path} holds {_text(first_values)}, {path} holds {_text(values)}: a value of "
                f"{MIN_SINGLE_VALUE} or more stands for the only class if every mask has just this and 0; "
                "expected one such value in all masks, or 0, 1, 2, ... for the classes of class_names"
            )
    return ((0, 0), (first_values[0], 1)) if _is_high(first_values) else None


def check_several_values(masks: Collection[Path | None], num_classes: int) -> None:
    """Raises: ValueError: masks of several classes all hold 0 and one undeclared value, such as 255."""
    read = list(islice(_foreground_values(masks), 1))
    if not read or not _is_high(read[0][1]) or read[0][1][0] < num_classes:
        return  # no further mask is read, as of most datasets
    read = list(islice(_foreground_values(masks), _NUM_MASKS_READ))
    if len({values for _, values in read}) == 1:
        path, values = read[0]
        raise ValueError(
            f"{path} and the other masks hold {_text(values)}: this is one class besides the background, "
            f"but class_names names {num_classes - 1}"
        )


def relabelled(label: np.ndarray, relabel: Relabel, path: Path) -> np.ndarray:
    """A label map with the values of the dataset in place of those of its file.

    Args:
        label: not below 0.
        relabel: see `Case.relabel`.
        path: the file, for messages.

    Raises:
        ValueError: a value that is not among those to relabel.
    """
    new_values = dict(relabel)
    # Indexed by the value in the file; -1 marks values that are not declared
    table = np.full(1 + max(*new_values, int(label.max())), -1, np.int16)
    table[list(new_values)] = list(new_values.values())
    new_label: np.ndarray = table[label]
    undeclared = np.unique(label[new_label < 0]).tolist()
    if undeclared:
        expected = ", ".join(str(value) for value in sorted(new_values))
        raise ValueError(f"{path}: label values {undeclared} are not declared, expected {expected}")
    return new_label


def _foreground_values(masks: Iterable[Path | None]) -> Iterable[tuple[Path, tuple[int, ...]]]:
    """Pictures that hold values other than 0, and these values."""
    for path in masks:
        if path is None or not is_picture(path):
            continue
        try:
            values = np.unique(read_mask(path)).tolist()
        except ValueError:  # the check of the dataset reports it with its case
            continue
        foreground = tuple(int(value) for value in values if value != 0)
        if foreground:
            yield path, foreground


def _is_high(values: tuple[int, ...]) -> bool:
    return len(values) == 1 and values[0] >= MIN_SINGLE_VALUE


def _text(foreground: tuple[int, ...]) -> str:
    """Such as `0, 128`."""
    return ", ".join(map(str, (0, *foreground[:8])))
