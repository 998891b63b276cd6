"""medconv/data/loading/annotated.py: which labels cases lack."""

from dataclasses import replace
from pathlib import Path

from helpers.volumes import tiny

from medconv.data.loading.annotated import annotated_classes
from medconv.targets.regions import RegionTargets


def test_outputs_follow_from_annotated_label_values(tmp_path: Path) -> None:
    first, second, _ = tiny(tmp_path).cases
    dataset, train = tiny(tmp_path / "again"), [first, replace(second, annotated=(2,))]
    assert annotated_classes([first], dataset.targets, dataset.class_names) is None
    annotated = annotated_classes(train, dataset.targets, dataset.class_names)
    assert annotated == {"case_0": ((1, 2), (True, True, True)), "case_1": ((2,), (True, False, True))}
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), None, (1, 2))
    annotated = annotated_classes(train, regions, dataset.class_names)
    assert annotated is not None and annotated["case_1"].outputs == (False, True)
