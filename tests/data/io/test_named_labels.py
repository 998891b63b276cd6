"""medconv/data/io/label_values.py: label files that name their values are matched by name."""

from collections.abc import Mapping

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import edit_json, write_nnunet
from nibabel.nifti1 import Nifti1Extension

from medconv.data.case_files import label_of
from medconv.data.datasets.dataset_json import nnunet
from medconv.data.datasets.folder import folder
from medconv.data.io.images import label_names, read_label, stem
from medconv.data.preprocessing.check import check
from medconv.evaluation.segmentation import evaluate

nrrd = pytest.importorskip("nrrd", reason="the extra `nrrd`")
Names = Mapping[int, str]
# Values 1 and 2 of the array
LABEL = np.zeros((6, 7, 8), np.uint8)
LABEL[1:3, 2:4] = 1
LABEL[4:6, 1:6, 3:7] = 2
AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])


def save_seg_nrrd(path, names, label=LABEL):
    """As 3D Slicer 5 writes a segmentation."""
    header = {
        "space": "left-posterior-superior",
        "space directions": np.eye(3).tolist(),
        "space origin": [0, 0, 0],
        "kinds": ["domain"] * 3,
    }
    for number, (value, name) in enumerate(names.items()):
        segment = f"Segment{number}"
        header |= {
            f"{segment}_ID": f"Segment_{number}",
            f"{segment}_LabelValue": str(value),
            f"{segment}_Layer": "0",
        }
        header[f"{segment}_Name"] = name
    path.parent.mkdir(exist_ok=True, parents=True)
    nrrd.write(str(path), label, header)
    return path


def save_nifti(path, names, label=LABEL):
    """With the header extension of Connectome Workbench, as TotalSegmentator writes it."""
    table = "".join(
        f'<Label Key="{value}" Red="1"><![CDATA[{name}]]></Label>' for value, name in names.items()
    )
    text = f'<?xml version="1.0"?><CaretExtension><LabelTable>{table}</LabelTable></CaretExtension>'
    image = nib.Nifti1Image(label, AFFINE)
    if names:
        image.header.extensions.append(Nifti1Extension(0, text.encode()))
    path.parent.mkdir(exist_ok=True, parents=True)
    nib.save(image, path)
    return path


def write(root, *names, nifti=False):
    """A case for each naming; all have the same voxels. Returns the patterns of images and labels."""
    (root / "images").mkdir()
    for number, of_file in enumerate(names):
        voxels = np.random.default_rng(number).normal(size=LABEL.shape).astype(np.float32)
        nib.save(nib.Nifti1Image(voxels, AFFINE), root / f"images/{number}.nii.gz")
        if nifti:
            save_nifti(root / f"labels/{number}.nii.gz", of_file)
        else:
            save_seg_nrrd(root / f"labels/{number}.seg.nrrd", of_file)
    return str(root / "images"), str(root / "labels")


def values_of(dataset):
    """What the first and the second structure of each label map are read as."""
    return [[int(label[1, 2, 0]), int(label[4, 1, 3])] for label in (label_of(c)[0] for c in dataset.cases)]


@pytest.mark.parametrize("nifti", [False, True], ids=["seg.nrrd", "NIfTI"])
def test_files_that_number_the_same_classes_otherwise_are_matched_by_name(tmp_path, nifti):
    names = (
        {1: "spleen", 2: "Left kidney"},
        {1: "left_kidney", 2: "Spleen"},
        {2: "spleen", 1: "left kidney"},
    )
    paths = write(tmp_path, *names, nifti=nifti)
    dataset = folder(*paths)
    assert dataset.class_names == ("background", "spleen", "Left kidney")
    assert values_of(dataset) == [[1, 2], [2, 1], [2, 1]]
    assert values_of(folder(*paths, class_names=["none", "left kidney", "spleen"])) == [
        [2, 1],
        [1, 2],
        [1, 2],
    ]
    assert [report for report in check(dataset, 1).warnings if "class" in report] == []


def test_files_numbered_as_the_classes_are_read_as_they_are(tmp_path):
    dataset = folder(*write(tmp_path, {1: "a", 2: "b"}, {1: "a", 2: "b"}))
    assert [case.relabel for case in dataset.cases] == [None, None]


@pytest.mark.parametrize(
    ("names", "class_names", "words"),
    [
        (({1: "a", 2: "b"}, {1: "a", 2: "c"}), ["bg", "a", "b"], r"1\.seg\.nrrd: 2 is 'c', which is not a class"),
        (({1: "a", 2: "A"},), ["bg", "a", "b"], r"0\.seg\.nrrd: 2 is 'A', and so is another value"),
        (({1: "b", 2: "a"}, {}), ["bg", "a", "b"], r"1\.seg\.nrrd: states no names, and other files"),
        (({1: "x", 2: "y"}, {1: "y", 2: "x"}), ["bg", "a", "b"], r"1\.seg\.nrrd: 1 is 'y', but not in .*/0\.seg"),
    ],
)  # fmt: skip
def test_contradictions_are_one_error(tmp_path, names, class_names, words):
    paths = write(tmp_path, *names)
    with pytest.raises(ValueError, match=rf"(?s)^names in label files contradict each other, .*{words}"):
        folder(*paths, class_names=class_names)


def test_names_in_other_words_than_the_classes_get_a_word(tmp_path, caplog):
    dataset = folder(*write(tmp_path, {1: "Milz", 2: "Niere"}), class_names=["bg", "spleen", "kidney"])
    assert values_of(dataset) == [[1, 2]]
    assert (
        "label files name their values 1: Milz, 2: Niere, none of which is among the classes" in caplog.text
    )


def test_names_behind_the_first_files_are_compared_by_the_check(tmp_path):
    """Files are not all opened for names that the first twenty lack."""
    names = [{}] * 21
    names[9] = {1: "2", 2: "1"}  # the last one by its id
    dataset = folder(*write(tmp_path, *names, nifti=True))
    with pytest.raises(
        ValueError, match=r"case 9: .*/9\.nii\.gz: its value 1 is '2', but would be read as 1"
    ):
        check(dataset, 1)


def test_each_rater_is_matched_by_name(tmp_path):
    raters = pytest.importorskip("medconv.features.raters.targets")
    dataset = folder(*write(tmp_path, {1: "a", 2: "b"}))
    save_seg_nrrd(tmp_path / "second/0.seg.nrrd", {1: "b", 2: "a"}, np.where(LABEL, 3 - LABEL, 0))
    rated = raters.SoftTargets.with_soft_labels(dataset, str(tmp_path / "second"), None)
    (case,) = rated.cases
    first, second = case.soft_label.label_maps(case)[0]
    np.testing.assert_array_equal(first, second)


def test_references_are_matched_by_name(tmp_path):
    predictions = tmp_path / "predictions"
    save_nifti(predictions / "0.nii.gz", {})
    (predictions / "prediction.json").write_text('{"class_names": ["bg", "a", "b"]}')
    save_seg_nrrd(tmp_path / "references/0.seg.nrrd", {1: "b", 2: "a"}, np.where(LABEL, 3 - LABEL, 0))
    evaluation = evaluate(predictions, tmp_path / "references")
    assert evaluation.result["mean"]["dice"] == 1


def test_the_table_of_workbench_is_read_by_its_own_code(tmp_path):
    """nibabel knows no content of extensions with codes of 18 and more."""
    path = save_nifti(tmp_path / "a.nii.gz", {1: "liver"})
    image = nib.load(path)
    (extension,) = image.header.extensions
    image.header.extensions[:] = [Nifti1Extension(30, extension.content)]
    nib.save(image, path)
    assert label_names(path) == {1: "liver"}


def test_names_of_values_within_regions_must_agree(tmp_path):
    """`core` would be the necrosis of one case and the edema of the other."""
    names = [{1: "necrosis", 2: "edema"}, {1: "edema", 2: "necrosis"}]
    root = write_nnunet(tmp_path, len(names))
    for case, of_case in enumerate(names):
        save_nifti(root / f"labelsTr/case_{case}.nii.gz", of_case)
    edit_json(root, labels={"background": 0, "whole": [1, 2], "core": 1}, regions_class_order=[2, 1])
    with pytest.raises(ValueError, match=r"case_1.nii.gz: 1 is 'edema', but not in .*case_0"):
        nnunet(root)


def test_a_damaged_label_file_leaves_the_others_their_names(tmp_path):
    """It is an error of its case, not of all."""
    kinds = ({1: "liver", 2: "spleen"}, {1: "spleen", 2: "liver"}, {1: "liver", 2: "spleen"})
    images, labels = write(tmp_path, *kinds, nifti=True)
    damaged = tmp_path / "labels/2.nii.gz"
    damaged.write_bytes(b"")
    dataset = folder(images, labels, class_names=["background", "liver", "spleen"])
    assert [case.relabel is None for case in dataset.cases] == [False, False, True]
    ((error,),) = check(dataset, 1, skip=True).errors.values()
    assert str(damaged) in error


@pytest.mark.parametrize("text", ["<LabelTable>", "<LabelTable><Label Key='x'/></LabelTable>", "no XML"])
def test_other_extensions_state_no_names(tmp_path, text):
    image = nib.Nifti1Image(LABEL, AFFINE)
    image.header.extensions.append(Nifti1Extension(0, text.encode()))
    nib.save(image, tmp_path / "a.nii.gz")
    assert label_names(tmp_path / "a.nii.gz") == {}
    assert read_label(tmp_path / "a.nii.gz")[0].max() == 2


def test_the_case_of_a_segmentation_has_no_second_suffix(tmp_path):
    assert stem(save_seg_nrrd(tmp_path / "case.seg.nrrd", {1: "a"})) == "case"
