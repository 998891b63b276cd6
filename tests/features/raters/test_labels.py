"""medconv/features/raters/: labels of several raters, files of probabilities, and how they are prepared."""

from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.rated import add_rater, with_raters, write_probabilities
from helpers.stores import rewritten, times, touch
from helpers.volumes import SHAPE, affine_of, label_array, preprocessing_config, save, write_msd, write_nnunet
from PIL import Image

from medconv.data.case import Case, Grid
from medconv.data.case_files import image_of, label_of
from medconv.data.datasets.dataset_json import msd, nnunet
from medconv.data.datasets.folder import folder
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, fill_store
from medconv.data.preprocessing.preprocess import preprocess_image, preprocess_label
from medconv.features.raters.labels import (
    RatedLabel,
    preprocess_probabilities,
    probabilities_on,
    rated,
    rater_labels_on,
)
from medconv.features.raters.probabilities import read_probabilities
from medconv.features.raters.targets import SoftTargets
from medconv.metrics.consensus import most_probable


def test_the_label_is_the_mean_of_the_raters_and_their_consensus_where_both_agree(tmp_path):
    dataset = with_raters(write_msd(tmp_path, 3), cases=2)
    assert type(dataset.targets) is SoftTargets and dataset.targets.names == ("big", "small")
    case, alone = dataset.cases[0], dataset.cases[2]
    assert [path and path.parent.name for path in case.label_files] == ["labelsTr", "labelsTr2"]
    assert alone.label_files[1] is None and len(alone.files) == 2 and len(case.files) == 3
    first = label_array(0)
    probabilities, _ = rated(case).probabilities(case)
    # the second rater lacks the plane 6 of the first class
    assert set(np.unique(probabilities[0, 6])) == {0, 0.5}
    np.testing.assert_array_equal(probabilities[0, :6], first[:6] == 1)
    np.testing.assert_array_equal(probabilities[1], first == 2)
    second = first.copy()
    second[6][second[6] == 1] = 0
    np.testing.assert_array_equal(label_of(case)[0], second)
    _, grid = image_of(case)
    np.testing.assert_array_equal(rater_labels_on(case, grid), [first, second])
    assert rater_labels_on(alone, grid)[1] is None


def test_masks_of_each_rater_have_a_value_of_their_own_for_the_only_class(tmp_path):
    mask = np.tri(8, dtype=np.uint8)
    for name, pixels in (("images", 7 * mask), ("labels", mask), ("labels2", 255 * mask)):
        (tmp_path / name).mkdir()
        for case in ("a", "b"):
            Image.fromarray(pixels).save(tmp_path / name / f"{case}.png")
    for first, second in (("labels", "labels2"), ("labels2", "labels")):
        dataset = folder(str(tmp_path / "images"), str(tmp_path / first))
        (case, _) = SoftTargets.with_soft_labels(dataset, [second], None, str(tmp_path)).cases
        _, grid = image_of(case)
        of_first, of_second = rater_labels_on(case, grid)
        assert of_first.sum() == mask.sum()
        np.testing.assert_array_equal(of_first, of_second)


def test_prepared_labels_depend_on_what_the_values_of_a_further_rater_stand_for():
    def declared(*of_further):
        label = RatedLabel(2, (Path("b.png"),), of_further)
        return label.declared(Case("a", (Path("a.png"),), Path("a.png"), soft_label=label))

    as_first, bright, inverted = (
        declared(relabel) for relabel in (None, ((0, 0), (255, 1)), ((0, 1), (1, 0)))
    )
    assert as_first == [False]
    assert as_first != bright != inverted != as_first


def test_labels_of_raters_may_be_a_mask_for_each_class(tmp_path):
    """Of which `class_names` takes some, in another order than files have."""
    label = label_array(0)
    for case in ("a", "b"):
        save(tmp_path / case / "image.nii.gz", label.astype(np.float32))
        for rater in ("r1", "r2"):
            for value, name in ((1, "zone"), (2, "gland"), (3, "bone")):
                save(tmp_path / case / rater / f"{name}.nii.gz", (label == value).astype(np.uint8))
    pattern = "{id}/r1/{class}.nii.gz"
    names = ["background", "zone", "gland"]
    dataset = folder("{id}/image.nii.gz", pattern, names, root=str(tmp_path))
    further = pattern.replace("r1", "r2")
    case = SoftTargets.with_soft_labels(dataset, [further], None, str(tmp_path)).cases[0]
    _, grid = image_of(case)
    for of_rater in rater_labels_on(case, grid):
        np.testing.assert_array_equal(of_rater, np.where(label < 3, label, 0))


def test_each_of_several_further_raters_counts(tmp_path):
    root = write_msd(tmp_path, 1)
    first = label_array(0)
    (path,) = (root / "labelsTr").iterdir()
    affine = nib.load(path).affine
    answers = [first]
    for number, plane in ((2, 6), (3, 5), (4, 6)):
        answer = first.copy()
        answer[plane][answer[plane] == 1] = 0
        save(root / f"labelsTr{number}" / path.name, answer, affine)
        answers.append(answer)
    folders = [f"labelsTr{number}/{{id}}.nii.gz" for number in (2, 3, 4)]
    (case,) = SoftTargets.with_soft_labels(msd(root), folders, None, str(root)).cases
    probabilities, _ = rated(case).probabilities(case)
    np.testing.assert_allclose(probabilities[0], np.mean([answer == 1 for answer in answers], axis=0))
    _, grid = image_of(case)
    np.testing.assert_array_equal(rater_labels_on(case, grid), answers)


def test_files_of_probabilities_may_have_a_channel_for_the_background(tmp_path):
    dataset = SoftTargets.with_soft_labels(msd(write_probabilities(write_msd(tmp_path, 1))), None, True)
    (case,) = dataset.cases
    _, grid = image_of(case)
    probabilities = probabilities_on(case, grid)
    np.testing.assert_allclose(probabilities, 0.75 * np.stack([label_array(0) == 1, label_array(0) == 2]))
    np.testing.assert_array_equal(label_of(case)[0], label_array(0))
    assert rater_labels_on(case, grid) == []


def test_probabilities_have_the_spacing_that_the_dataset_states(tmp_path):
    dataset = SoftTargets.with_soft_labels(msd(write_probabilities(write_msd(tmp_path, 1))), None, True)
    case = replace(dataset.cases[0], source_spacing_mm=(0.5, 0.75, 4.0))
    probabilities, grid = rated(case).probabilities(case)
    assert grid.spacing_mm == pytest.approx((0.5, 0.75, 4.0))
    np.testing.assert_array_equal(probabilities_on(case, image_of(case)[1]), probabilities)


@pytest.mark.parametrize(
    ("raters", "soft_labels", "message"),
    [
        ("labelsTr3", None, "raters=.*labelsTr3: no such folder"),
        ("imagesTr/{id}_0000.nii.gz", True, "soft_labels=true takes one file for each case, without raters"),
        (
            ["labelsTr2/case_{id}.nii.gz"],
            None,
            "raters=.*: no label of a case there; its ids are 0, 1, those",
        ),
    ],
)
def test_settings_that_say_nothing_of_the_cases_are_refused(tmp_path, raters, soft_labels, message):
    dataset = msd(add_rater(write_msd(tmp_path, 2)))
    with pytest.raises(ValueError, match=message):
        SoftTargets.with_soft_labels(dataset, raters, soft_labels, str(tmp_path))


def test_regions_and_ignored_voxels_are_refused(tmp_path):
    dataset = nnunet(write_nnunet(tmp_path))
    regions = dataset.with_targets(regions={"both": ["big", "small"]}, regions_order=None, ignore_label=None)
    with pytest.raises(ValueError, match="soft_labels is for label maps of classes, .* has regions targets"):
        SoftTargets.with_soft_labels(regions, None, True)
    ignoring = dataset.with_targets(regions=None, regions_order=None, ignore_label=9)
    with pytest.raises(ValueError, match="raters cannot be combined with a value to ignore: ignore_label"):
        SoftTargets.with_soft_labels(ignoring, "labelsTr", None, str(tmp_path))


def test_a_rater_with_a_further_class_or_another_grid_is_an_error_of_its_file(tmp_path):
    import nibabel as nib

    dataset = with_raters(write_msd(tmp_path, 1))
    path = dataset.cases[0].label_files[1]
    assert path is not None
    image = nib.load(path)
    nib.save(nib.Nifti1Image(np.full(image.shape, 7, np.uint8), image.affine), path)
    with pytest.raises(
        ValueError, match=r"labelsTr2/case_0.nii.gz: label value 7 is not declared, expected 0 to 2"
    ):
        label_of(dataset.cases[0])
    nib.save(nib.Nifti1Image(np.zeros((3, 3, 3), np.uint8), image.affine), path)
    with pytest.raises(ValueError, match=r"labelsTr2/case_0.nii.gz: shape \(3, 3, 3\) differs"):
        label_of(dataset.cases[0])


def test_with_or_without_the_background_and_of_one_class_without_a_fourth_axis(tmp_path):
    drawn = np.random.default_rng(0).random((4, 5, 6, 3)).astype(np.float32)
    drawn /= drawn.sum(-1, keepdims=True)
    with_background = read_probabilities(save(tmp_path / "all.nii.gz", drawn), 3)[0]
    without = read_probabilities(save(tmp_path / "some.nii.gz", drawn[..., 1:]), 3)[0]
    np.testing.assert_allclose(with_background, without, atol=1e-6)
    np.testing.assert_allclose(without, np.moveaxis(drawn[..., 1:], -1, 0), atol=1e-6)
    assert read_probabilities(save(tmp_path / "one.nii.gz", drawn[..., 1]), 2)[0].shape == (1, 4, 5, 6)


def test_rounding_is_mended_and_the_background_keeps_no_less_than_nothing(tmp_path):
    almost = np.zeros((2, 2, 2, 2), np.float32)
    almost[0] = [1.0005, -0.0005]
    almost[1] = [0.5004, 0.5004]
    read, _ = read_probabilities(save(tmp_path / "almost.nii.gz", almost), 3)
    assert read.min() == 0 and read.sum(0).max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([255.0, 0.0], r"a probability must lie between 0 and 1, found 255 at voxel \(0, 0, 0\)"),
        ([np.nan, 0.0], "a probability must lie between 0 and 1, found nan"),
        ([0.8, 0.7], "the sum of all classes must lie between 0 and 1, found 1.5"),
        (
            [0.1],
            "expected probabilities in 2 channels, one for each class, or 3 with the background, found 1",
        ),
    ],
)
def test_other_values_are_refused(tmp_path, values, message):
    path = save(tmp_path / "case.nii.gz", np.full((2, 2, 2, len(values)), values, np.float32))
    with pytest.raises(ValueError, match=f"case.nii.gz: {message}"):
        read_probabilities(path, 3)


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
