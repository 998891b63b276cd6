"""What training samples draw from: cases by weight, classes equally often, and which labels a case lacks."""

import logging
from collections import Counter
from collections.abc import Sequence

from medconv.data import splits
from medconv.data.case import Case, Dataset
from medconv.data.loading.patch_dataset import Annotated
from medconv.data.preprocessing.store import Store
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets

log = logging.getLogger(__name__)


def announce(train: Sequence[Case], dataset: Dataset) -> None:
    """Log which classes training cases annotate, and their weights; nothing where all cases are alike."""
    if any(case.annotated is not None for case in train):
        counts = [
            f"{name} in {sum(case.annotated is None or value in case.annotated for case in train)}"
            for value, name in enumerate(dataset.class_names[1:], start=1)
        ]
        log.info("data: annotated, of %d training cases: %s", len(train), ", ".join(counts))
    weights = Counter(case.weight for case in train)
    if len(weights) > 1:
        counts = [f"{weight:g} of {count}" for weight, count in sorted(weights.items())]
        log.info("data: training cases are drawn by weight: %s", ", ".join(counts))


def draw_from(
    train: Sequence[Case], targets: Targets, class_names: Sequence[str], store: Store
) -> list[list[int]]:
    """Indices of the training cases of each class; of label maps, of those with an annotated voxel of it.

    Raises: ValueError: image-level targets without classes.
    """
    if not targets.per_voxel:
        return [group.tolist() for group in targets.balanced_groups(splits.values_of(train))]
    present = [set(store.read(case.id).foreground[:, 0].tolist()) for case in train]
    known = [p if c.annotated is None else p & {*c.annotated} for p, c in zip(present, train, strict=True)]
    having = [[n for n, p in enumerate(known) if value in p] for value in range(1, len(class_names))]
    counts = ", ".join(f"{name} in {len(cases)}" for name, cases in zip(class_names[1:], having, strict=True))
    log.info("data: patches draw each class equally often; of %d training cases: %s", len(train), counts)
    for name in (name for name, cases in zip(class_names[1:], having, strict=True) if not cases):
        log.warning("data.balanced_sampling: no training case has a voxel of %s once prepared", name)
    return having


def annotated(
    cases: Sequence[Case], targets: Targets, class_names: Sequence[str]
) -> dict[str, Annotated] | None:
    """Of each case, if one lacks labels."""
    if not isinstance(targets, SegmentationTargets) or all(case.annotated is None for case in cases):
        return None
    known = {case.id: case.annotated or tuple(range(1, len(class_names))) for case in cases}
    return {case: Annotated(values, targets.annotated_outputs(values)) for case, values in known.items()}
