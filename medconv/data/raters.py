"""Labels of several raters, or that are probabilities: `data.raters` and `data.soft_labels` of any layout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from medconv.data.case import Dataset, Relabel, SoftLabel
from medconv.data.datasets.patterns import files_of
from medconv.data.io.label_values import names_of, relabel_by_name
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.soft import SoftTargets
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some


def with_soft_labels(
    dataset: Dataset, raters: str | Sequence[str] | None, soft_labels: bool | None, root: str | None = None
) -> Dataset:
    """The dataset whose labels are probabilities.

    Args:
        dataset: with label maps of exclusive classes; its labels are those of the first rater.
        raters: a folder or a pattern of label files for each further rater; a rater may lack cases.
        soft_labels: whether the label files hold probabilities.
        root: folder in which relative patterns begin; None: the current one.

    Raises:
        ArgumentError: both, a dataset without such classes, a rater without any case, or as `files_of`.
    """
    name = "soft_labels" if soft_labels else "raters"
    if type(dataset.targets) is not LabelMapTargets:
        raise ArgumentError(
            name, f" is for label maps of classes, but this dataset has {dataset.targets.kind} targets"
        )
    if dataset.targets.ignore is not None:
        raise ArgumentError(name, " cannot be combined with a value to ignore: ", Argument("ignore_label"))
    if raters is None:
        files: list[dict[str, Path]] = []
    elif soft_labels:
        raise ArgumentError("soft_labels", "=true takes one file for each case, without ", Argument("raters"))
    else:
        patterns = [raters] if isinstance(raters, str) else raters
        files = [_files_of_rater(Path(root or "") / pattern, dataset) for pattern in patterns]
    relabels = [_relabels_by_name(of_rater, dataset) for of_rater in files]
    cases = []
    # A case without files of further raters is a case of one rater
    for case in dataset.cases:
        soft_label = SoftLabel(
            num_classes=len(dataset.class_names),
            further_raters=tuple(of_rater.get(case.id) for of_rater in files),
            further_relabels=tuple(of_rater.get(case.id, case.relabel) for of_rater in relabels),
            are_probabilities=bool(soft_labels),
        )
        cases.append(replace(case, soft_label=soft_label))
    targets = SoftTargets.of_classes(dataset.class_names)
    return replace(dataset, cases=tuple(cases), targets=targets)


def _relabels_by_name(files: Mapping[str, Path], dataset: Dataset) -> dict[str, Relabel | None]:
    """How the files of a rater are read, by case; empty: they state no names, so as the first rater's."""
    names = names_of(files)
    by_name = relabel_by_name(files, names, dataset.class_names) if names else {}
    return {case_id: by_name.get(case_id) for case_id in names}


def _files_of_rater(pattern: Path, dataset: Dataset) -> dict[str, Path]:
    """Case id to the label file of a rater. Raises: ArgumentError: no case has one."""
    files = files_of(pattern, "raters")
    ids = {case.id for case in dataset.cases}
    if not ids & set(files):
        raise ArgumentError(
            "raters",
            f"={pattern}: no label of a case there; its ids are {some(sorted(files), 3)}, "
            f"those of the cases {some(sorted(ids), 3)}",
        )
    return files
