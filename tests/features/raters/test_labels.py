"""medconv/features/raters/labels.py: label files of several raters and of probabilities, from any layout."""

import nibabel as nib
import numpy as np
import pytest
from helpers.rated import add_rater, with_raters, write_probabilities
from helpers.volumes import label_array, save, write_msd, write_nnunet

from medconv.data.case_files import image_of, label_of
from medconv.data.datasets.dataset_json import msd, nnunet
from medconv.features.raters.labels import probabilities_on, rated, rater_labels_on
from medconv.features.raters.targets import SoftTargets


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
