"""medconv/features/dicom/rtstruct_label.py: contours of RTSTRUCT files as label maps, in training and evaluation."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import AXIAL, OBLIQUE, array, series
from helpers.label_maps import with_names
from helpers.volumes import preprocessing_config

from medconv.data.case import Case, Dataset
from medconv.data.datasets.folder import folder as folder_layout
from medconv.data.io.images import read_label
from medconv.data.io.writing import write_label
from medconv.data.per_case import with_annotated
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.evaluation import segmentation
from medconv.features.dicom.rtstruct_label import missing_slices, structures_of
from medconv.features.report.segmentation_report import page as page_of
from medconv.inference.inputs import find_cases

OUTER = [(1.5, 1.5), (6.5, 1.5), (6.5, 5.5), (1.5, 5.5)]  # columns and rows, in voxels
INNER = [(2.5, 2.5), (4.5, 2.5), (4.5, 4.5), (2.5, 4.5)]
CORNER = [(6.6, 4.6), (7.5, 4.6), (7.5, 5.5), (6.6, 5.5)]
KEYHOLE = [*OUTER, OUTER[0], *INNER[::-1], INNER[-1], OUTER[0]]  # its seam passes middles of voxels
Contours = dict[str, list[tuple[float, list[tuple[float, float]]]]]


def rtstruct(path, contours, affine, kind="CLOSED_PLANAR"):
    """Args: contours: of each structure, (slice, points in the slice) in voxels. affine: voxels to RAS+ mm."""
    content = dicoms.one(np.zeros((1, 1), np.int16), "1.2.840.10008.5.1.4.1.1.481.3", Modality="RTSTRUCT")
    for name in ("Rows", "Columns", "PixelData"):
        delattr(content, name)
    content.StructureSetROISequence, content.ROIContourSequence = dicoms.Items(), dicoms.Items()
    for number, (name, drawn) in enumerate(contours.items(), 11):
        space = content.FrameOfReferenceUID
        roi = dicoms.item(ROINumber=number, ROIName=name, ReferencedFrameOfReferenceUID=space)
        content.StructureSetROISequence.extend(roi)
        items = dicoms.Items()
        for z, points in drawn:
            mm = nib.affines.apply_affine(np.diag([-1, -1, 1, 1]) @ affine, [(*p, z) for p in points])
            data = [f"{v:.5f}" for v in mm.ravel()]
            count = len(points)
            items.extend(
                dicoms.item(ContourGeometricType=kind, NumberOfContourPoints=count, ContourData=data)
            )
        content.ROIContourSequence.extend(
            dicoms.item(ReferencedROINumber=number, **({"ContourSequence": items} if drawn else {}))
        )
    return dicoms.save(content, path)


def box(z, ring=False):
    mask = np.zeros((9, 7, 5), np.int16)
    mask[2:7, 2:6, z] = 1
    if ring:
        mask[3:5, 3:5, z] = 0
    return mask


def test_a_slice_without_a_contour_between_two_that_have_one_is_named(tmp_path):
    scan = series(tmp_path / "scan", array())
    contours = {
        "heart": [(z, OUTER) for z in (0, 1, 3, 4)],
        "lung": [(z, OUTER) for z in (1, 2, 3)],
        "nodes": [(0, INNER), (1, INNER), (4, CORNER)],  # two parts
        "cord": [(z, INNER) for z in (0, 1, 4)],
    }
    path = Path(f"{rtstruct(tmp_path / 'rs.dcm', contours, dicoms.affine())}#roi=heart;lung;nodes;cord")
    _, grid = read_label(path, scan)
    warning = (
        f"{tmp_path / 'rs.dcm'}: structure 'heart' has no contour on slice 2 (from 0) of {scan}, but on both "
        "beside it; if it was forgotten, draw it: its voxels are background"
    )
    longer = warning.replace("heart", "cord").replace("slice 2 ", "slice 2 to 3 ")
    assert missing_slices(path, scan, grid) == [warning, longer]
    case = Case("a", (scan,), path)
    dataset = Dataset("x", (case,), ("background", "heart", "lung", "nodes", "cord"), ("MR",))
    assert f"case a: {warning}" in check(dataset, 1).warnings


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE])
@pytest.mark.parametrize("hole", ["contour", "keyhole", "xor"])
def test_voxels_inside_the_contours_of_their_slice_are_labelled(tmp_path, orientation, hole):
    scan = series(tmp_path / "scan", array(), orientation)
    ring = [(3, KEYHOLE)] if hole == "keyhole" else [(3, OUTER), (3, INNER)]
    contours = {"Body ": [(z, OUTER) for z in range(5)], "Ring": ring, "empty": []}
    kind = "CLOSEDPLANAR_XOR" if hole == "xor" else "CLOSED_PLANAR"
    path = rtstruct(tmp_path / "rs.dcm", contours, dicoms.affine(orientation), kind)
    label, grid = read_label(Path(f"{path}#roi=ring"), scan)
    np.testing.assert_array_equal(label, box(slice(3, 4), ring=True))
    np.testing.assert_allclose(grid.matrix, dicoms.affine(orientation), atol=1e-6)
    both = read_label(Path(f"{path}#roi=Rumpf|body;ring"), scan)[0]  # the later one is above
    np.testing.assert_array_equal(both, box(slice(0, 5)) + box(slice(3, 4), ring=True))
    assert read_label(Path(f"{path}#roi=ring;body"), scan)[0].max() == 2


def test_curves_have_their_area_and_shared_edges_are_given_once(tmp_path):
    affine = np.diag([0.5, 0.5, 2.0, 1.0])
    nib.save(nib.Nifti1Image(np.zeros((80, 70, 3), np.uint8), affine), image := tmp_path / "i.nii.gz")
    angles = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    circle = [(40.3 + 25 * np.cos(a), 33.7 + 25 * np.sin(a)) for a in angles]
    left, right = [(5, 5), (20, 5), (20, 60), (5, 60)], [(20, 5), (30, 5), (30, 60), (20, 60)]
    path = rtstruct(tmp_path / "rs.dcm", {"c": [(1, circle)], "l": [(0, left)], "r": [(0, right)]}, affine)
    x, y = np.mgrid[:80, :70]
    label = read_label(Path(f"{path}#roi=c"), image)[0]
    inside = np.hypot(x - 40.3, y - 33.7)
    assert (label[..., 1][inside < 24.98] == 1).all() and not label[..., 1][inside > 25].any()
    sizes = np.bincount(read_label(Path(f"{path}#roi=l;r"), image)[0].ravel())
    assert sizes[1:].tolist() == [15 * 55, 10 * 55]


def test_the_grid_may_have_its_axes_in_another_order(tmp_path):
    """As a NIfTI file of the series that a converter has turned."""
    coronal = (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
    scan = series(tmp_path / "scan", array(), coronal)
    path = rtstruct(tmp_path / "rs.dcm", {"a": [(1, OUTER), (2, OUTER)]}, dicoms.affine(coronal))
    write_label(tmp_path / "as_scanned.nii.gz", box(slice(1, 3)), scan)
    turned = nib.as_closest_canonical(nib.load(tmp_path / "as_scanned.nii.gz"))
    nib.save(turned, tmp_path / "turned.nii.gz")
    label = read_label(Path(f"{path}#roi=a"), tmp_path / "turned.nii.gz")[0]
    np.testing.assert_array_equal(label, turned.get_fdata())
    assert label.shape == (9, 5, 7)


def test_patterns_train_and_evaluate(tmp_path):
    contours = {"Heart": [(2, OUTER)], "Lung": [(3, OUTER)]}
    for case in "ab":
        scan = series(tmp_path / case / "ct", array(seed=ord(case)))
        rtstruct(tmp_path / case / "rs.dcm", contours, dicoms.affine())
        write_label(tmp_path / "pred" / f"{case}.nii.gz", box(slice(2, 3)) + 2 * box(slice(3, 4)), scan)
    pattern = f"{tmp_path}/{{id}}/rs.dcm#roi=heart|herz;lung"
    assert structures_of(pattern) == ["heart|herz", "lung"]
    dataset = folder_layout(f"{tmp_path}/{{id}}/ct", pattern)
    assert dataset.class_names == ("background", "heart", "lung")
    result = check(dataset, workers=1)
    assert not result.errors and np.array(result.fingerprint.class_voxels)[:, 1:].tolist() == [[20, 20]] * 2
    evaluation = segmentation.evaluate(tmp_path / "pred", Path(pattern), None)
    assert evaluation.result["mean"]["dice"] == 1.0 and len(evaluation.result["cases"]) == 2
    assert page_of(evaluation)  # reads label maps of the worst cases again
    rtstruct(tmp_path / "b/rs.dcm", {"Heart": [(2, OUTER)]}, dicoms.affine())
    with pytest.raises(ValueError, match=r"case b: .*rs\.dcm: no structures are 'lung'; there are 'Heart'"):
        check(dataset, workers=1)
    partly = check(with_annotated(dataset, {"b": ["heart"]}), workers=1)
    assert not partly.errors
    assert np.array(partly.fingerprint.class_voxels)[:, 1:].tolist() == [[20, 20], [20, 0]]
    with pytest.raises(ValueError, match=r"a structure has no name, expected #roi=NAME;NAME"):
        folder_layout(f"{tmp_path}/{{id}}/ct", f"{pattern};;liver")


@pytest.mark.parametrize("names", [("heart", "lung"), None])
def test_a_missing_structure_is_prepared_and_evaluated_where_it_is_not_annotated(tmp_path, names):
    """Case b has no lung. Args: names: of the classes, beside the predictions; None: they are numbered."""
    for case, drawn in (("a", {"Heart": [(2, OUTER)], "Lung": [(3, OUTER)]}), ("b", {"Heart": [(2, OUTER)]})):
        scan = series(tmp_path / case / "ct", array(seed=ord(case)))
        rtstruct(tmp_path / case / "rs.dcm", drawn, dicoms.affine())
        write_label(tmp_path / "pred" / f"{case}.nii.gz", box(slice(2, 3)) + 2 * box(slice(3, 4)), scan)
    pattern = f"{tmp_path}/{{id}}/rs.dcm#roi=heart;lung"
    dataset = with_annotated(folder_layout(f"{tmp_path}/{{id}}/ct", pattern), {"b": ["heart"]})
    store = fill_store(dataset, preprocessing_config((0.7, 0.8, 6.5)), tmp_path / "cache", 1)
    assert [np.unique(store.read(case).label).tolist() for case in "ab"] == [[0, 1, 2], [0, 1]]
    if names:
        with_names(tmp_path / "pred", "background", *names)
    heart, lung = names or ("1", "2")
    evaluation = segmentation.evaluate(tmp_path / "pred", Path(pattern), annotated=[f"b={heart}"])
    expected = [{heart: 1.0, lung: 1.0}, {heart: 1.0, lung: None}]
    assert [row["dice"] for row in evaluation.result["cases"]] == expected
    assert page_of(evaluation)
    with pytest.raises(ValueError, match=r"case b: .*rs\.dcm: no structures are 'lung'; there are 'Heart'"):
        segmentation.evaluate(tmp_path / "pred", Path(pattern))
    with pytest.raises(ValueError, match=r"case b: .*rs\.dcm: no structures are 'lung'"):
        segmentation.evaluate(tmp_path / "pred", Path(pattern), annotated=[f"b={heart},{lung}"])
    with pytest.raises(ValueError, match=rf"annotated b=x: no class 'x'; there are {heart}, {lung}"):
        segmentation.evaluate(tmp_path / "pred", Path(pattern), annotated=["b=x"])


def test_structures_that_are_not_annotated_may_be_missing_in_joined_labels_too(tmp_path):
    label = tmp_path / "rs.dcm#roi=heart|herz;lung;liver"
    case = Case("a", (tmp_path / "ct",), label, relabel=((0, 0), (1, 3), (2, 1), (3, 2)))
    joined = Dataset("d", (case,), ("background", "lung", "liver", "heart"), ("CT",))
    (case,) = with_annotated(joined, {"a": ["heart", "liver"]}).cases
    assert case.label == tmp_path / "rs.dcm#roi=heart|herz;;liver" and case.annotated == (2, 3)


@pytest.mark.parametrize(
    ("structure", "contours", "kind", "message"),
    [
        ("b", {"a": [(2, OUTER)]}, "CLOSED_PLANAR", "no structures are 'b'; there are 'a'"),
        ("a", {"a": [(2, OUTER)], "A": []}, "CLOSED_PLANAR", "2 structures are 'a'; there are 'a', 'A'"),
        ("a", {"a": []}, "CLOSED_PLANAR", "structure 'a' has no contour"),
        ("a", {"a": [(2, OUTER[:1])]}, "POINT", "structure 'a' has a contour of type POINT, expected CLOSED"),
        ("a", {"a": [(2.4, OUTER)]}, "CLOSED_PLANAR", "'a' has a contour 0.4 slices beside the slices of"),
        ("a", {"a": [(5, OUTER)]}, "CLOSED_PLANAR", "structure 'a' has a contour outside"),
        ("a", {"a": [(2, [(x - 20, y) for x, y in OUTER])]}, "CLOSED_PLANAR", "has a contour outside"),
        ("a", {"a": [(z, OUTER) for z in (0, 2, 4)]}, "CLOSED_PLANAR", "has contours 2 slices of"),
        (
            "a",
            {"a": [(2, [(2.1, 2.1), (2.4, 2.1), (2.1, 2.4)])]},
            "CLOSED_PLANAR",
            "no voxel of .* its centre",
        ),
    ],
)
def test_an_error_names_file_and_structure(tmp_path, structure, contours, kind, message):
    scan = series(tmp_path / "scan", array())
    path = rtstruct(tmp_path / "rs.dcm", contours, dicoms.affine(), kind)
    with pytest.raises(ValueError, match=rf"rs\.dcm: .*{message}"):
        read_label(Path(f"{path}#roi={structure}"), scan)


def test_other_files_and_other_patients_are_refused(tmp_path):
    scan = series(tmp_path / "scan", array())
    path = rtstruct(tmp_path / "rs.dcm", {"a": [(2, OUTER)]}, dicoms.affine())
    other = series(tmp_path / "other", array(), FrameOfReferenceUID="1.2.3")
    with pytest.raises(
        ValueError, match=r"rs\.dcm: structure 'a' belongs to frame of reference .*, but .*1\.2\.3"
    ):
        read_label(Path(f"{path}#roi=a"), other)
    with pytest.raises(ValueError, match="expected RTSTRUCT for #roi=, got MR"):
        read_label(Path(f"{next(scan.iterdir())}#roi=a"), scan)
    (tmp_path / "text.dcm").write_text("text")
    with pytest.raises(ValueError, match=r"text\.dcm: cannot be read as RTSTRUCT"):
        read_label(Path(f"{tmp_path}/text.dcm#roi=a"), scan)
    with pytest.raises(
        ValueError, match=r"rs\.dcm: contours \(RTSTRUCT\), which are labels with #roi=NAME;NAME"
    ):
        read_label(path)
    with pytest.raises(
        ValueError, match="#roi=a takes structures of an RTSTRUCT file, a label; expected an image"
    ):
        read_label(find_cases(Path(f"{scan}#roi=a"), 1)[0].images[0])


def test_a_contour_that_a_file_holds_twice_is_no_hole_in_itself(tmp_path):
    scan = series(tmp_path / "scan", array())
    file = rtstruct(tmp_path / "rs.dcm", {"heart": [(1, OUTER), (1, OUTER)]}, dicoms.affine())
    label, _ = read_label(Path(f"{file}#roi=heart"), scan)
    np.testing.assert_array_equal(label, box(1))
