import numpy as np

from medconv.metrics import surface_distance
from medconv.metrics.class_masks import ClassMasks


def test_what_several_metrics_need_is_measured_once() -> None:
    prediction = np.zeros((12, 6, 6), bool)
    prediction[2:8, 2:4, 2:4] = True
    reference = np.roll(prediction, 1, 0)
    masks = ClassMasks(prediction, reference, (1.0, 2.0, 3.0), 6.0, tolerance_mm=1.0, lesion_iou=0.5)
    assert masks.sizes == (24, 24)
    assert surface_distance.hd95(masks.distances) == 1.0
    assert masks.lesions.overlaps == (5 / 7,)
    for line, mask in zip(masks.centrelines, (prediction, reference), strict=True):
        assert line.any() and not (line & ~mask).any()
    assert masks.distances is masks.distances and masks.centrelines is masks.centrelines
