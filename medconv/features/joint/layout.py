"""`data=joint`: images with label maps, and a table of the values of each image."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from medconv.data.case import Dataset
from medconv.data.datasets.dataset_json import auto
from medconv.data.datasets.folder import folder
from medconv.data.datasets.tables import case_of_row, is_missing, read_rows, row_ids
from medconv.features.image_level.table_targets import targets_of_columns
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.features.joint.targets import JointTargets
from medconv.targets.label_map import LabelMapTargets
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some

_DEFAULT_MODALITY = "MRI"
log = logging.getLogger(__name__)


def joint(
    table: str | None,
    root: str | None = None,
    images: str | Mapping[str, str] | None = None,
    labels: str | None = None,
    label_columns: Sequence[str] | str | None = None,
    target_type: str | None = None,
    value_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    modality: str = _DEFAULT_MODALITY,
) -> Dataset:
    """Label maps, and the values of their images. A case without a row has no value.

    Args:
        table: with a column `case` or `path`, and the values.
        root: folder with a `dataset.json`; with `images` and `labels`, where their patterns begin.
        images, labels, class_names, modality: as of `folder`.
        label_columns: of the table; None: `label`.
        target_type, value_names: kind of the values and their names, as of `data=csv`.
    Raises:
        ValueError: no such files, values that fit no kind, or no case with a value.
    """
    if not table or not Path(table).is_file():
        raise ArgumentError("table", f"={table}: no such file, expected a table (CSV) of the values of cases")
    if images or labels:
        dataset = folder(images or "", labels or "", class_names, modality, root)
    else:
        dataset = auto(root or "")
        if class_names and tuple(class_names) != dataset.class_names:
            raise ArgumentError(
                "class_names", f"={list(class_names)}: has no effect, as {root} names its classes itself"
            )
        if modality != _DEFAULT_MODALITY and {*dataset.modalities} != {modality}:
            raise ArgumentError(
                "modality", f"={modality}: has no effect, as {root} names its channels itself"
            )
    if type(dataset.targets) is not LabelMapTargets:
        raise ArgumentError("root", f"={root}: has {dataset.targets.kind}, expected label maps of classes")
    columns = [label_columns] if isinstance(label_columns, str) else list(label_columns or ["label"])
    ids = dataset.case_ids
    known_ids = frozenset(ids)
    of_image, values, errors = _read(Path(table), known_ids, columns, target_type, value_names)
    lacking = [case_id for case_id in ids if case_id not in values and case_id not in errors]
    others = [case_id for case_id in values if case_id not in known_ids]
    if len(lacking) == len(ids):
        raise ArgumentError(
            "table", f"={table}: no row of a case; it has {some(others, 3)}, the cases are {some(ids, 3)}"
        )
    if lacking:
        log.warning(
            "%s: %d of %d cases have no value, and train the label map alone: %s",
            *(table, len(lacking), len(ids), some(lacking, 3)),
        )
    if others:
        log.warning("%s: rows of %d cases that the dataset lacks: %s", table, len(others), some(others, 3))
    unknown = (math.nan,) * of_image.num_values
    maps = dataset.targets
    return replace(
        dataset,
        cases=tuple(replace(case, values=values.get(case.id, unknown)) for case in dataset.cases),
        errors={**{case_id: errors[case_id] for case_id in ids if case_id in errors}, **dataset.errors},
        targets=JointTargets(maps.names, maps.values, maps.ignore, of_image=of_image),
    )


def _read(
    path: Path,
    cases: Collection[str],
    columns: Sequence[str],
    target_type: str | None,
    names: Sequence[str] | None,
) -> tuple[ImageLevelTargets, dict[str, tuple[float, ...]], dict[str, str]]:
    """What the values mean, case to its values, and case to what is wrong with its row.

    Raises: ValueError: a column that the table lacks, two rows of one case, or as `targets_of_columns`.
    """
    header, numbered_rows = read_rows(path)
    for column in columns:
        if column not in header:
            raise ArgumentError(
                "label_columns", f": {path} has no column {column!r}, it has {', '.join(header)}"
            )
    if not {"case", "path"} & set(header):
        raise ArgumentError(
            "table", f"={path}: a column 'case' or 'path' is needed, to tell the case of a row"
        )
    rows = [row for _, row in numbered_rows]
    ids = row_ids(path, header, rows, used_columns=columns)
    # the text of each row, empty where it stands for no value
    cells = [["" if is_missing(row[column], names) else row[column] for row in rows] for column in columns]
    try:
        of_image = targets_of_columns(columns, cells, target_type, names, path)
    except ArgumentError as error:
        argument = "value_names" if error.argument == "class_names" else error.argument
        raise ArgumentError(argument, *error.pieces) from error
    except ValueError as error:
        raise ValueError(str(error).replace("in class_names", "in value_names")) from error
    values: dict[str, tuple[float, ...]] = {}
    errors: dict[str, str] = {}
    for row_id, (number, _), *texts in zip(ids, numbered_rows, *cells, strict=True):
        case_id = case_of_row(row_id, cases)
        if case_id in values or case_id in errors:
            raise ValueError(f"{path}, row {number}: case {case_id} is there twice")
        if not any(texts):
            continue
        try:
            values[case_id] = of_image.parse(dict(zip(columns, texts, strict=True)))
        except ValueError as error:
            errors[case_id] = f"{path.name}, row {number}: {error}"
    return of_image, values, errors
