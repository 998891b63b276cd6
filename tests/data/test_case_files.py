"""medconv/data/case_files.py: a stated spacing is in force for images, labels, plans, stores and predictions."""

from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
from helpers.loaded_models import segmentation
from helpers.volumes import SHAPE, label_array, preprocessing_config, save, tiny
from torch import nn

from medconv.data.case import Case
from medconv.data.case_files import image_of, label_of
from medconv.data.io.writing import write_label
from medconv.data.loading.patch_dataset import CaseDataset
from medconv.data.per_case import with_source_spacing
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, fill_store
from medconv.inference.predictor import Predictor

LAS = np.diag([-1.0, 1.0, 1.0, 1.0])
TRUE_MM = [1.0, 1.5, 2.0]


@pytest.fixture
def lost(tmp_path):
    """1 x 1 x 1 mm in all headers; the first label runs from right to left over the grid of its image."""
    dataset = tiny(tmp_path / "lost", affine=np.eye(4))
    first = dataset.cases[0].label
    assert first is not None
    flipped = LAS.copy()
    flipped[0, 3] = SHAPE[0] - 1
    save(first, label_array(0)[::-1], flipped)
    return dataset


def test_images_labels_and_the_plan_have_the_stated_spacing(lost):
    stated = with_source_spacing(lost, TRUE_MM)
    assert image_of(stated.cases[0])[1].spacing_mm == label_of(stated.cases[0])[1].spacing_mm == (1, 1.5, 2)
    assert image_of(lost.cases[0])[1].spacing_mm == (1, 1, 1)
    measured, warnings, _ = check(stated, 1)
    assert measured.spacings_mm == ((1.0, 1.5, 2.0),) * 3 and not warnings


def test_a_stated_spacing_is_prepared_apart(lost, tmp_path):
    """At 1.5 mm: as if headers said so, in a store of its own; the fingerprint is measured anew."""
    stated, config = with_source_spacing(lost, TRUE_MM), preprocessing_config((1.5, 1.5, 1.5))
    stores = [fill_store(dataset, config, tmp_path / "store", 1) for dataset in (lost, stated)]
    assert stores[0].folder != stores[1].folder
    assert stores[1].read("case_0").label.shape == (8, 14, 13)
    assert stores[1].read("case_0").crop_info.spacing_mm((12, 14, 10)) == (1, 1.5, 2)
    right = fill_store(tiny(tmp_path / "right"), config, tmp_path / "of_right", 1)
    for name in ("image", "label"):
        arrays = [getattr(store.read("case_0"), name) for store in (stores[1], right)]
        np.testing.assert_array_equal(*arrays)
    found = [
        cached_fingerprint(dataset, tmp_path / "store", 1)[0].spacings_mm[0] for dataset in (lost, stated)
    ]
    assert found == [(1, 1, 1), (1, 1.5, 2)]


def test_validation_turns_a_label_as_preparation_does(lost, tmp_path):
    store = fill_store(lost, preprocessing_config((1, 1, 1)), tmp_path, 1)
    item = CaseDataset(store, lost.cases)[0]
    np.testing.assert_array_equal(item["reference"], label_array(0))


def test_prediction_takes_the_stated_spacing_and_keeps_the_header(lost, tmp_path):
    case = Case("case_0", lost.cases[0].images)
    network = nn.Conv3d(1, 2, 1)
    predictor = Predictor([segmentation(network, source_spacing_mm=TRUE_MM)])
    ready = predictor.read(case)
    assert ready.arrays[0].shape == (1, 12, 21, 20) and ready.warning is None
    answer = predictor.answer(predictor.scores([ready])[0])
    write_label(tmp_path / "out.nii.gz", answer, case.images[0])
    written, image = nib.load(tmp_path / "out.nii.gz"), nib.load(case.images[0])
    assert written.shape == image.shape and (written.affine == image.affine).all()
    by_case = Predictor([segmentation(network, source_spacing_mm={"case_1": TRUE_MM})])
    assert "its spacing is its header's" in str(by_case.read(case).warning)
    with pytest.raises(ValueError, match="source_spacing_mm differ"):
        Predictor([replace(predictor.members[0]), segmentation(network)])
