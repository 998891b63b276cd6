"""Which classes a case annotates, where some cases lack labels."""

from collections.abc import Sequence
from typing import NamedTuple

from medconv.data.case import Case
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets


class Annotated(NamedTuple):
    """Of a case that lacks some labels.

    Args:
        values: label values that are annotated.
        outputs: as `targets.annotated_outputs`.
    """

    values: tuple[int, ...]
    outputs: tuple[bool, ...]


def annotated_classes(
    cases: Sequence[Case], targets: Targets, class_names: Sequence[str]
) -> dict[str, Annotated] | None:
    """The annotated classes of every case, by its id; None if no case lacks labels."""
    if not isinstance(targets, SegmentationTargets):
        return None
    if all(case.annotated is None for case in cases):
        return None
    all_values = tuple(range(1, len(class_names)))
    annotated = {}
    for case in cases:
        values = case.annotated or all_values
        annotated[case.id] = Annotated(values, targets.annotated_outputs(values))
    return annotated
