"""`data=joined`: several datasets with labels of their own, joined by the names of their classes."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import auto, msd, nnunet
from medconv.data.datasets.folder import folder
from medconv.data.datasets.tables import spelling_error
from medconv.data.preprocessing.normalisation import normalisation_for
from medconv.targets.label_map import LabelMapTargets
from medconv.utils.errors import Argument, ArgumentError

log = logging.getLogger(__name__)

_LAYOUTS: dict[str, Callable[..., Dataset]] = {
    "auto": auto,
    "folder": folder,
    "image_mask": folder,
    "msd": msd,
    "nnunet": nnunet,
}
# Keys of an entry that are not arguments of its layout
_ENTRY_KEYS = ("layout", "rename", "ignore_label")


def joined(entries: Mapping[str, Mapping[str, Any]] | None) -> Dataset:
    """One dataset with the classes of all: a case annotates those of its own dataset, see `Case.annotated`.

    Case ids and groups begin with the name of the dataset and `_`.

    Args:
        entries: name to `layout` and its arguments, such as {layout: nnunet, root: /data/kits}; besides,
            `rename`, a class there to its name here, and `ignore_label`, as in `Dataset.with_targets`.

    Raises:
        ValueError: names the wrong entry, or those that do not fit together.
    """
    if not isinstance(entries, Mapping) or len(entries) < 2:
        raise ArgumentError(
            "entries",
            f"={entries}: expected at least two datasets, "
            "such as {a: {layout: msd, root: /data/a}, b: {...}}",
        )
    datasets = {str(name): _dataset(str(name), entry) for name, entry in entries.items()}
    modalities = _modalities(datasets)
    class_names = _all_class_names(datasets)
    ignore = _common_ignore(datasets, class_names)
    cases: list[Case] = []
    errors: dict[str, str] = {}
    names = ", ".join(f"{value} {name}" for value, name in enumerate(class_names))
    log.info("data: label values of the joined dataset, and of its predictions: %s", names)
    for name, dataset in datasets.items():
        cases += _renumbered_cases(name, dataset, class_names, ignore)
        for case_id, error in dataset.errors.items():
            errors[f"{name}_{case_id}"] = error
    return Dataset(  # each of them has matched its label values and names
        name="_".join(datasets),
        cases=tuple(sorted(cases, key=lambda case: case.id)),
        class_names=class_names,
        targets=LabelMapTargets.of_classes(class_names, ignore),
        modalities=modalities,
        errors=errors,
    )


def _all_class_names(datasets: Mapping[str, Dataset]) -> tuple[str, ...]:
    """The background, and the foreground classes of all datasets, each once.

    Raises: ValueError: a class in two spellings.
    """
    foreground: dict[str, None] = {}  # in order
    for dataset in datasets.values():
        foreground.update(dict.fromkeys(dataset.class_names[1:]))
    error = spelling_error(foreground)
    if error:
        raise ArgumentError("entries", f": {error}; `rename` in an entry gives them one name")
    return ("background", *foreground)


def _common_ignore(datasets: Mapping[str, Dataset], class_names: Sequence[str]) -> int | None:
    """The label value to ignore in all datasets, above all classes; None: none has one."""
    targets = [dataset.targets for dataset in datasets.values()]
    ignored = [each.ignore for each in targets if each.ignore is not None]
    return max([len(class_names), *ignored]) if ignored else None


def _dataset(name: str, entry: Any) -> Dataset:
    """The dataset of an entry, its classes renamed.

    Args:
        name: of the entry.
        entry: value of the entry.

    Raises: ValueError: names the entry.
    """
    argument = f"entries.{name}"
    if not re.fullmatch(r"[A-Za-z0-9-]+", name):
        raise ArgumentError(argument, ": names begin case ids: only letters, digits and hyphens")
    if not isinstance(entry, Mapping) or entry.get("layout") not in _LAYOUTS:
        layouts = ", ".join(_LAYOUTS)
        raise ArgumentError(argument, f"={entry}: expected a `layout`, one of {layouts}, and its keys")
    layout = _LAYOUTS[entry["layout"]]
    arguments = {argument: value for argument, value in entry.items() if argument not in _ENTRY_KEYS}
    try:
        signature(layout).bind(**arguments)
    except TypeError as error:
        keys = ", ".join([*signature(layout).parameters, "rename", "ignore_label"])
        problem = f": {error}; the keys of layout {entry['layout']} are {keys}"
        raise ArgumentError(argument, problem) from error
    try:
        dataset = layout(**arguments).with_targets(
            regions=None, regions_order=None, ignore_label=entry.get("ignore_label")
        )
    except ArgumentError as error:
        raise ArgumentError(f"{argument}.{error.argument}", *error.pieces) from error
    except ValueError as error:
        raise ArgumentError(argument, f": {error}") from error
    if not isinstance(dataset.targets, LabelMapTargets):
        raise ArgumentError(
            argument,
            ": has regions; only classes are joined, and ",
            Argument("regions"),
            " makes regions of all",
        )
    class_names = _renamed(dataset.class_names, entry.get("rename") or {}, argument)
    return replace(dataset, class_names=class_names)


def _renamed(class_names: Sequence[str], rename: Any, argument: str) -> tuple[str, ...]:
    """Class names after renaming; the background keeps its name.

    Args:
        class_names: by label value.
        rename: foreground class to its new name.
        argument: entry, for messages.

    Raises: ValueError: an unknown class, or two classes with one name.
    """
    background, *foreground = class_names
    if not isinstance(rename, Mapping) or not set(rename) <= set(foreground):
        expected = f"{{CLASS: NAME}} of {', '.join(foreground)}"
        raise ArgumentError(f"{argument}.rename", f"={rename}: expected {expected}")
    new_names = (background, *(str(rename.get(name, name)) for name in foreground))
    if len(set(new_names)) < len(new_names):
        raise ArgumentError(argument, f": every class needs a name of its own, got {', '.join(new_names)}")
    return new_names


def _modalities(datasets: Mapping[str, Dataset]) -> tuple[str, ...]:
    """The modalities of the first dataset.

    Raises: ValueError: another dataset differs in number, order, or normalisation.
    """
    first_name = next(iter(datasets))
    expected = datasets[first_name].modalities
    expected_names = [modality.strip().lower() for modality in expected]
    for name, dataset in datasets.items():
        names = [modality.strip().lower() for modality in dataset.modalities]
        # Spelling is free, but CT, for example, has a unit that normalisation uses
        has_same_kinds = normalisation_for(None, names) == normalisation_for(None, expected_names)
        if not has_same_kinds or _has_other_order(names, expected_names):
            raise ArgumentError(
                f"entries.{name}",
                f": its channels are {', '.join(dataset.modalities)}; ",
                Argument(f"entries.{first_name}"),
                f" has {', '.join(expected)}; expected the same, in the same order, in all",
            )
    return expected


def _has_other_order(names: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether a channel is called as another one of the other dataset; repeated names say nothing."""
    once = {name for name in names if names.count(name) == expected.count(name) == 1}
    return any(name in once and name != there for name, there in zip(names, expected, strict=False))


def _renumbered_cases(
    dataset_name: str, dataset: Dataset, class_names: Sequence[str], ignore: int | None
) -> list[Case]:
    """The cases of a dataset, with label values of the joined dataset.

    Args:
        dataset_name: begins their ids and groups.
        dataset: one of the datasets.
        class_names: of the joined dataset.
        ignore: label value to ignore in the joined dataset.
    """
    annotated = [class_names.index(name) for name in dataset.class_names[1:]]
    has_all_classes = len(annotated) == len(class_names) - 1
    new_values = _relabel(dataset, annotated, len(class_names), ignore)
    cases = []
    for case in dataset.cases:
        relabel = case.relabel
        if new_values is not None:
            of_dataset = relabel or tuple((value, value) for value in new_values)
            relabel = tuple((value, new_values[label]) for value, label in of_dataset)
        joined_case = replace(
            case,
            id=f"{dataset_name}_{case.id}",
            own_id=case.id,
            group=f"{dataset_name}_{case.group}" if case.group else "",
            relabel=relabel,
            annotated=None if has_all_classes else tuple(sorted(annotated)),
        )
        cases.append(joined_case)
    return cases


def _relabel(
    dataset: Dataset, annotated: Sequence[int], num_classes: int, ignore: int | None
) -> dict[int, int] | None:
    """Label value in one of the datasets to that in the joined dataset; None: they are the same.

    Args:
        dataset: one of the datasets.
        annotated: joined label value of each of its foreground classes.
        num_classes: of the joined dataset, with the background.
        ignore: label value to ignore in the joined dataset.
    """
    targets = dataset.targets
    has_same_classes = list(annotated) == list(range(1, num_classes))
    has_same_ignore = targets.ignore == ignore and not targets.also_ignored
    if has_same_classes and has_same_ignore:
        return None
    # Also if no value changes: values that are not here are not declared
    new_values = {0: 0, **dict(enumerate(annotated, start=1))}
    if targets.ignore is not None and ignore is not None:
        new_values |= dict.fromkeys((targets.ignore, *targets.also_ignored), ignore)
    return dict(sorted(new_values.items()))
