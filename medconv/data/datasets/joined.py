"""`data=joined`: several datasets with labels of their own, joined by the names of their classes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from medconv.data.case import Case, Dataset
from medconv.data.datasets.auto import auto
from medconv.data.datasets.common import build_dataset
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.folder import folder
from medconv.data.datasets.nnunet import nnunet
from medconv.targets.label_map import LabelMapTargets

_LAYOUTS: dict[str, Callable[..., Dataset]] = {
    "auto": auto,
    "folder": folder,
    "image_mask": folder,
    "msd": msd,
    "nnunet": nnunet,
}
_OWN = ("layout", "rename", "ignore_label")


def joined(entries: Mapping[str, Mapping[str, Any]] | None) -> Dataset:
    """One dataset with the classes of all: a case annotates those of its own dataset, see `Case.annotated`.

    Case ids and groups begin with the name of the dataset and `_`.
    Args: entries: name to `layout` and its arguments, such as {layout: nnunet, root: /data/kits}; with
        `rename`, a class there to its name here, and `ignore_label`, as the key of `data`.
    Raises: ValueError: names the wrong entry, or those that do not fit together.
    """
    if not isinstance(entries, Mapping) or len(entries) < 2:
        what = "at least two datasets, such as {a: {layout: msd, root: /data/a}, b: {...}}"
        raise ValueError(f"data.entries={entries}: expected {what}")
    datasets = {str(name): _dataset(str(name), entry) for name, entry in entries.items()}
    modalities = _modalities(datasets)
    names = tuple(dict.fromkeys(n for dataset in datasets.values() for n in dataset.class_names[1:]))
    ignored = [d.targets.ignore for d in datasets.values() if d.targets.ignore is not None]
    ignore = max([1 + len(names), *ignored]) if ignored else None
    cases = [case for name, dataset in datasets.items() for case in _cases(name, dataset, names, ignore)]
    errors = {f"{name}_{case}": e for name, d in datasets.items() for case, e in d.errors.items()}
    class_names = ("background", *names)
    targets = LabelMapTargets.of_classes(class_names, ignore)
    home = next(path.parent for case in cases for path in case.files)
    return build_dataset("_".join(datasets), cases, class_names, targets, modalities, home, errors)


def _dataset(name: str, entry: Any) -> Dataset:
    """An entry, its classes renamed."""
    key = f"data.entries.{name}"
    if not re.fullmatch(r"[A-Za-z0-9-]+", name):
        raise ValueError(f"{key}: a name begins case ids, and has letters, digits and hyphens alone")
    if not isinstance(entry, Mapping) or entry.get("layout") not in _LAYOUTS:
        raise ValueError(f"{key}={entry}: expected a `layout`, one of {', '.join(_LAYOUTS)}, and its keys")
    layout = _LAYOUTS[entry["layout"]]
    arguments = {k: value for k, value in entry.items() if k not in _OWN}
    try:
        signature(layout).bind(**arguments)
    except TypeError as error:
        keys = ", ".join([*signature(layout).parameters, *_OWN[1:]])
        raise ValueError(f"{key}: {error}; the keys of layout {entry['layout']} are {keys}") from error
    try:
        dataset = layout(**arguments).with_targets(
            regions=None, regions_order=None, ignore_label=entry.get("ignore_label")
        )
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if not isinstance(dataset.targets, LabelMapTargets):
        raise ValueError(
            f"{key}: has regions; only classes are joined, and data.regions makes regions of all"
        )
    return replace(dataset, class_names=_renamed(dataset.class_names, entry.get("rename") or {}, key))


def _renamed(names: Sequence[str], rename: Any, key: str) -> tuple[str, ...]:
    if not isinstance(rename, Mapping) or not {*rename} <= {*names[1:]}:
        what = f"{{CLASS: NAME}} of {', '.join(names[1:])}"
        raise ValueError(f"{key}.rename={rename}: expected {what}")
    new = (names[0], *(str(rename.get(name, name)) for name in names[1:]))
    if len({*new}) < len(new):
        raise ValueError(f"{key}: every class needs a name of its own, got {', '.join(new)}")
    return new


def _modalities(datasets: Mapping[str, Dataset]) -> tuple[str, ...]:
    """Of the first dataset. Raises: ValueError: others differ in number, order, or in which are CT."""
    (first, one), *others = datasets.items()
    for name, other in others:
        called = [[m.strip().lower() for m in dataset.modalities] for dataset in (one, other)]
        kinds = [[modality == "ct" for modality in modalities] for modalities in called]
        turned = called[0] != called[1] and sorted(called[0]) == sorted(called[1])
        if kinds[0] != kinds[1] or turned:
            text = f"{', '.join(other.modalities)}; data.entries.{first} has {', '.join(one.modalities)}"
            raise ValueError(
                f"data.entries.{name}: its channels are {text}; expected the same, in the same order, in all"
            )
    return one.modalities


def _cases(name: str, dataset: Dataset, names: tuple[str, ...], ignore: int | None) -> list[Case]:
    own = [1 + names.index(n) for n in dataset.class_names[1:]]
    values = {0: 0, **dict(enumerate(own, start=1))}
    if dataset.targets.ignore is not None and ignore is not None:
        values |= dict.fromkeys((dataset.targets.ignore, *dataset.targets.also_ignored), ignore)
    # even one that changes nothing: other values of this dataset are not declared
    all_classes = own == list(range(1, len(names) + 1))
    same_ignore = dataset.targets.ignore == ignore and not dataset.targets.also_ignored
    relabel = None if all_classes and same_ignore else tuple(sorted(values.items()))
    annotated = None if len(own) == len(names) else tuple(sorted(own))
    return [
        replace(
            case,
            id=f"{name}_{case.id}",
            group=f"{name}_{case.group}" if case.group else "",
            relabel=relabel,
            annotated=annotated,
        )
        for case in dataset.cases
    ]
