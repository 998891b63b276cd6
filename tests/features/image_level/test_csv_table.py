"""medconv/features/image_level/csv_table.py: kinds of targets, splits and groups from a table; errors of rows."""

import numpy as np
import pytest
from helpers.volumes import pixels
from helpers.volumes import save as save_volume

from medconv.data.io.raster import write_picture
from medconv.data.preprocessing.check import check, examine_all
from medconv.features.image_level.csv_table import csv
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets


def table(root, text, images=6):
    """`text` as labels.csv beside images/0.png, images/1.png, ..."""
    (root / "images").mkdir(parents=True)
    for i in range(images):
        write_picture(root / f"images/{i}.png", pixels(i))
    path = root / "labels.csv"
    path.write_text(text)
    return path


ROWS = [
    f"images/{i}.png,{label},{split},p{i // 2}"
    for i, (label, split) in enumerate(zip("abbaba", ["train"] * 4 + ["val", "test"], strict=True))
]
GOOD = "path,label,split,patient\n" + "\n".join(ROWS)


def test_each_row_is_a_case(tmp_path):
    dataset = csv(table(tmp_path, GOOD), group_column="patient")
    assert dataset.targets == MulticlassTargets(("a", "b"))
    assert dataset.class_names == ("a", "b") and not dataset.errors
    assert [case.id for case in dataset.cases] == list("012345") and dataset.modalities == ("grey",)
    assert [case.values for case in dataset.cases] == [(0.0,), (1.0,), (1.0,), (0.0,), (1.0,), (0.0,)]
    assert [case.split for case in dataset.cases] == ["train"] * 4 + ["val", "test"]
    assert [case.group for case in dataset.cases] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert csv(tmp_path / "labels.csv", class_names=["b", "a"]).cases[0].values == (1.0,)
    assert check(dataset, 1).errors == {}


def test_columns_and_fractions_choose_the_kind_of_targets(tmp_path):
    text = "path;x;y\nimages/0.png;1;0.5\nimages/1.png;0;-2\n"
    path = table(tmp_path, text)
    numbers = csv(path, label_columns=["x", "y"], target_type="regression")
    assert numbers.targets == RegressionTargets(("x", "y"))
    assert numbers.cases[1].values == (0.0, -2.0)
    assert csv(path, label_columns="y").targets == RegressionTargets(("y",))  # it has fractions
    assert csv(path, label_columns="x").targets == MulticlassTargets(("0", "1"))
    findings = csv(path, label_columns=["x", "y"], target_type="multilabel")
    assert findings.targets == MultilabelTargets(("x", "y"))
    rule = "column 'y' must hold 0 or 1, or -1 or nothing where the finding is not known"
    hint = "target_type=regression takes any number"
    assert findings.errors == {
        "0": f"labels.csv, row 2: {rule}, got '0.5'; {hint}",
        "1": f"labels.csv, row 3: {rule}, got '-2'; {hint}",
    }


def test_repeated_file_names_get_the_folder_as_prefix(tmp_path):
    for name in ("a/scan.png", "b/scan.png"):
        (tmp_path / name).parent.mkdir()
        write_picture(tmp_path / name, pixels(len(name)))
    (tmp_path / "t.csv").write_text("path,label\na/scan.png,1\nb/scan.png,2\n")
    assert [case.id for case in csv(tmp_path / "t.csv").cases] == ["a_scan", "b_scan"]
    (tmp_path / "t.csv").write_text("path,label\na/scan.png,1\na/scan.png,2\n")
    with pytest.raises(ValueError, match=r"t\.csv: listed more than once: .*a/scan\.png$"):
        csv(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("images/9.png,a,train,p", "images/9.png: no such file"),
        (f"{'9' * 300},a,train,p", f"{'9' * 300}: no such file"),
        (",a,train,p", "column 'path' is empty, expected an image file"),
        ("images/0.png,,train,p", "column 'label' is empty, expected a label"),
        ("images/0.png,a,later,p", "column 'split' must be train, val or test, got 'later'"),
        ("images/0.png,a,train,", "column 'patient' is empty, expected the name of a group"),
        ("images/0.png,c,train,p", "column 'label': 'c' is not a class; the classes are a, b"),
    ],
)
def test_error_names_the_row(tmp_path, row, message):
    text = "path,label,split,patient\nimages/1.png,a,train,q\nimages/2.png,b,val,r\n" + row
    dataset = csv(table(tmp_path, text), group_column="patient", class_names=["a", "b"])
    (error,) = dataset.errors.values()
    assert error.startswith("labels.csv, row 4: ") and message in error
    with pytest.raises(ValueError, match="1 error in 3 cases"):
        check(dataset, 1)


def test_a_column_of_ids_names_the_cases(tmp_path, caplog):
    path = table(tmp_path, "case,path,label\ns1,images/0.png,a\ns2,images/1.png,b\n")
    assert [case.id for case in csv(path).cases] == ["s1", "s2"]
    path.write_text("case,path\na,images/0.png\nb,images/1.png\n")  # here it is the label
    assert [case.id for case in csv(path, label_columns="case").cases] == ["0", "1"]
    for other in ("s1", "../s2", ""):  # several images of a patient, or no name of a file
        path.write_text(f"case,path,label\ns1,images/0.png,a\n{other},images/1.png,b\n")
        assert [case.id for case in csv(path).cases] == ["0", "1"]
    assert caplog.text.count("the column 'case' does not name each row; cases are named after") == 3


def test_no_cell_of_a_row_is_left_out(tmp_path):
    path = table(tmp_path, "path,age\nimages/0.png,26.5,,,\n\nimages/1.png,30.5\n,,,\n")
    assert [case.values for case in csv(path, label_columns="age").cases] == [(26.5,), (30.5,)]
    path.write_text("path,age\nimages/0.png,26,6\nimages/1.png,30,5\n")
    with pytest.raises(
        ValueError, match=r"row 2: 3 cells, 2 columns: images/0\.png \| 26 \| 6; a cell that holds ',' must"
    ):
        csv(path, label_columns="age")


def test_decimal_commas_are_named(tmp_path):
    path = table(tmp_path, "path;label\nimages/0.png;0,5\nimages/1.png;1,5\n")
    for kind in (None, "regression"):
        with pytest.raises(
            ValueError, match="column 'label' holds numbers with a decimal comma, such as 0,5"
        ):
            csv(path, target_type=kind)
    assert csv(path, target_type="multiclass").targets == MulticlassTargets(("0,5", "1,5"))


@pytest.mark.parametrize("word", ["nan", "NA", "N/A", "None", "<NA>", "null", "#N/A"])
def test_words_for_no_value_are_no_class(tmp_path, word):
    path = table(tmp_path, f"path,label\nimages/0.png,a\nimages/1.png,{word}\nimages/2.png,b\n")
    dataset = csv(path)
    assert dataset.class_names == ("a", "b")
    assert dataset.errors == {
        "1": f"labels.csv, row 3: column 'label' holds {word}, which stands for no value; expected a label; "
        "if it is a class, list it in class_names"
    }
    listed = csv(path, class_names=["a", word, "b"])
    assert not listed.errors
    assert [case.values for case in listed.cases] == [(0.0,), (1.0,), (2.0,)]


def test_words_for_no_value_are_no_number_and_no_patient(tmp_path):
    path = table(tmp_path, "path,age,patient\nimages/0.png,1.5,p\nimages/1.png,NA,q\nimages/2.png,2,NA\n")
    dataset = csv(path, label_columns="age", group_column="patient")
    assert isinstance(dataset.targets, RegressionTargets)
    assert "column 'age' holds NA, which stands for no value" in dataset.errors["1"]
    assert dataset.errors["2"] == (
        "labels.csv, row 4: column 'patient' holds NA, which stands for no value; expected the name of a "
        "group, such as a patient"
    )


def test_one_class_in_two_spellings_is_an_error(tmp_path):
    path = table(tmp_path, "path,label\nimages/0.png,Benign\nimages/1.png,benign\nimages/2.png,cancer\n")
    with pytest.raises(
        ValueError,
        match=r"labels\.csv: column 'label' holds classes that differ in their spelling alone: Benign and "
        "benign; correct the table, or list all in class_names",
    ):
        csv(path)
    assert csv(path, class_names=["Benign", "benign", "cancer"]).cases[1].values == (1.0,)


def test_what_divides_cells(tmp_path):
    path = table(tmp_path, 'path,"left; right",mild; low; no\nimages/0.png,1,0\nimages/1.png,0,1\n')
    assert csv(path, label_columns=["left; right", "mild; low; no"]).targets.kind == "multilabel"
    path.write_text('\n"age, years; all";path;label\n1;images/0.png;a\n2;images/1.png;b\n')
    assert csv(path).class_names == ("a", "b")
    path.write_text(",path,label,\n0,images/0.png,a,blurred\n1,images/1.png,b\n")  # pandas' index, a note
    assert csv(path).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (
            GOOD,
            {"path_column": "file"},
            r"path_column: .*labels\.csv has no column 'file', it has path, label, split, patient",
        ),
        (GOOD, {"label_columns": "lable"}, r"label_columns: .* has no column 'lable'.*did you mean label\?"),
        (GOOD, {"group_column": "subject"}, r"group_column: .* no column 'subject'"),
        (
            GOOD,
            {"target_type": "class"},
            r"target_type must be one of multiclass, multilabel, ordinal, regression, or None, got 'class'",
        ),
        (
            GOOD,
            {"target_type": "multiclass", "label_columns": ["label", "split"]},
            r"target_type=multiclass takes one of label_columns",
        ),
        ("path,label\n", {}, "expected a row per image, found none"),
        ("path,label\nimages/0.png,a\n", {}, "column 'label' holds a, expected two classes or more"),
        (
            "path,label\n" + "".join(f"images/{i}.png,{i}\n" for i in range(101)),
            {},
            "101 different whole numbers from 0 to 100, which may be classes or numbers; set it to regression",
        ),
        ("path,label,label\nimages/0.png,a,b\n", {}, "column 'label' is there twice"),
    ],
)
def test_invalid_settings_and_tables_are_errors(tmp_path, text, settings, message):
    with pytest.raises(ValueError, match=message):
        csv(table(tmp_path, text), **settings)


def test_a_table_that_excel_saved_as_unicode_text_is_read(tmp_path):
    """In UTF-16, with tabs."""
    path = table(tmp_path, "")
    path.write_bytes(GOOD.replace(",", "\t").encode("utf-16"))
    assert csv(path, group_column="patient").targets == MulticlassTargets(("a", "b"))
    path.write_bytes(GOOD.replace("b", "gut\u00e4").encode("latin-1"))
    with pytest.raises(ValueError, match="labels.csv: expected text in UTF-8 or UTF-16"):
        csv(path)


def test_missing_root_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"root is not set"):
        csv(None)
    with pytest.raises(ValueError, match=r"root=.*nowhere"):
        csv(tmp_path / "nowhere")


def test_table_may_list_volumes(tmp_path):
    for i in range(2):
        save_volume(tmp_path / f"{i}.nii.gz", pixels(i, (4, 5, 6)))
    (tmp_path / "t.csv").write_text("path,label\n0.nii.gz,1\n1.nii.gz,0\n")
    dataset = csv(tmp_path / "t.csv", modality="CT")
    assert dataset.modalities == ("CT",) and check(dataset, 1).fingerprint.shapes == ((4, 5, 6), (4, 5, 6))


def test_an_unknown_finding_is_a_missing_value_of_several_labels_alone(tmp_path):
    rows = "path,x,y\nimages/0.png,1,-1\nimages/1.png,,0\nimages/2.png,NA,1\nimages/3.png,-1.0,\n"
    dataset = csv(table(tmp_path / "a", rows), label_columns=["x", "y"])
    values = {case.id: case.values for case in dataset.cases}
    np.testing.assert_equal(values["0"], (1.0, np.nan))
    np.testing.assert_equal(values["1"], (np.nan, 0.0))
    np.testing.assert_equal(values["2"], (np.nan, 1.0))
    reports = examine_all(dataset, 1)
    assert [report.case for report in reports if report.errors] == ["3"]
    assert reports[3].errors == ["all of its findings are missing, expected 0 or 1 for one at least"]
    sizes = csv(table(tmp_path / "b", "path,size\nimages/0.png,1.5\nimages/1.png,\n"), label_columns="size")
    assert sizes.errors["1"].endswith("column 'size' is empty, expected a number; leave out rows without one")


def test_a_stray_label_does_not_choose_the_kind(tmp_path):
    rows = "".join(f"images/{i}.png,{label}\n" for i, label in enumerate(["I", "II", "2.5", "II", "I"]))
    assert csv(table(tmp_path / "a", "path,label\n" + rows)).targets.kind == "multiclass"
    grades = "path,label\nimages/0.png,1\nimages/1.png,1.5\n"
    assert csv(table(tmp_path / "b", grades), class_names=["1", "1.5"]).targets.kind == "multiclass"
    ages = "".join(f"images/{i}.png,{40 + i}\n" for i in range(30)) + "images/30.png,\n"
    with pytest.raises(ValueError, match="30 different whole numbers from 40 to 69, which may be"):
        csv(table(tmp_path / "c", "path,label\n" + ages))
