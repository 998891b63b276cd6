"""Labels of raters and of probabilities in the store: their mean, resampled, apart from plain label maps."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.rated import add_rater, with_raters, write_probabilities
from helpers.stores import rewritten, times, touch
from helpers.volumes import SHAPE, affine_of, label_array, preprocessing_config, save, write_msd

from medconv.data.case import Grid
from medconv.data.datasets.dataset_json import msd
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, fill_store
from medconv.data.preprocessing.preprocess import preprocess_image, preprocess_label
from medconv.features.raters.labels import preprocess_probabilities
from medconv.features.raters.targets import SoftTargets
from medconv.metrics.consensus import most_probable


def test_the_labels_of_raters_are_prepared_as_their_mean(tmp_path):
    dataset = with_raters(write_msd(tmp_path / "data", 2))
    store = fill_store(dataset, preprocessing_config(), tmp_path / "store", 1)
    entry = store.read("case_0")
    first = label_array(0)
    assert entry.soft_label.dtype == np.float16 and entry.training_label is entry.soft_label
    assert set(np.unique(entry.soft_label[0, 6])) == {0, 0.5}
    np.testing.assert_array_equal(entry.label[:6], first[:6])
    assert not (entry.label[6] == 1).any()
    assert not (entry.foreground[entry.foreground[:, 0] == 1, 1] == 6).any()
    before = times(store)
    touch(tmp_path / "data/labelsTr2/case_1.nii.gz")
    assert rewritten(fill_store(dataset, preprocessing_config(), tmp_path / "store", 1), before) == {"case_1"}
    path = tmp_path / "data/labelsTr2/case_0.nii.gz"
    save(path, np.full(SHAPE, 7, np.uint8))
    with pytest.raises(
        ValueError, match=r"case case_0: .*labelsTr2/case_0.nii.gz: label value 7 is not declared"
    ):
        cached_fingerprint(dataset, tmp_path / "store", 1)


def test_label_maps_and_probabilities_of_the_same_files_are_prepared_apart(tmp_path):
    root = add_rater(write_msd(tmp_path / "data", 1))
    plain = msd(root)
    stores = [fill_store(plain, preprocessing_config(), tmp_path / "store", 1)]
    assert stores[0].read("case_0").soft_label.size == 0
    soft = SoftTargets.with_soft_labels(msd(write_probabilities(root)), None, True)
    stores.append(fill_store(soft, preprocessing_config(), tmp_path / "store", 1))
    assert stores[0].folder != stores[1].folder
    assert stores[1].read("case_0").soft_label.max() == 0.75


@pytest.mark.parametrize("convention", [None, "nnunet"])
def test_the_most_probable_class_is_that_of_a_resampled_label_map(convention):
    """Probabilities of 0 and 1, turned, cropped and resampled; across thick slices also by the nearest."""
    rng = np.random.default_rng(0)
    label = np.kron(rng.integers(0, 3, (4, 4, 4)), np.ones((4, 4, 2))).astype(np.int16)
    grid = Grid.of(label.shape, affine_of((1, 0, 2), (1, -1, 1), (1.0, 1.0, 4.0), (0, 0, 0)))
    config = replace(preprocessing_config((0.8, 1.3, 3.0)), convention=convention)
    image = np.pad(rng.normal(5, 1, (14, 15, 8)), ((1, 1), (0, 1), (0, 0)))[None].astype(np.float32)
    _, crop_info = preprocess_image(image, grid, config)
    masks = np.stack([label == 1, label == 2]).astype(np.float32)
    probabilities = preprocess_probabilities(masks, crop_info, config)
    expected = preprocess_label(label, crop_info, config, 3)
    assert probabilities.dtype == np.float16 and probabilities.shape == (2, *expected.shape)
    assert probabilities.min() >= 0 and probabilities.sum(0).max() <= 1.001
    agreement = (most_probable(probabilities.astype(np.float32)) == expected).mean()
    assert agreement > 0.99
