"""Whole images with values: data=csv, imagefolder and medmnist, and the parts that cases are divided into."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.volumes import save as save_volume

from medconv.data.case import Case, Dataset
from medconv.data.datasets.csv_table import csv
from medconv.data.datasets.image_folder import imagefolder
from medconv.data.datasets.medmnist import medmnist
from medconv.data.io.images import read_image
from medconv.data.io.raster import write_picture
from medconv.data.preprocessing.fingerprint import check
from medconv.data.splits import (
    DataSplit,
    check_examples,
    class_counts,
    drop_duplicates,
    indices_by_class,
    split_cases,
)
from medconv.targets.image_level import ImageLevelTargets


def pixels(seed: int, shape: tuple[int, ...] = (8, 9)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def table(root: Path, text: str, images: int = 6) -> Path:
    """`text` as labels.csv beside images/0.png, images/1.png, ..."""
    (root / "images").mkdir(parents=True)
    for i in range(images):
        write_picture(root / f"images/{i}.png", pixels(i))
    path = root / "labels.csv"
    path.write_text(text)
    return path


ROWS = [
    f"images/{i}.png,{label},{part},p{i // 2}"
    for i, (label, part) in enumerate(zip("abbaba", ["train"] * 4 + ["val", "test"], strict=True))
]
GOOD = "path,label,split,patient\n" + "\n".join(ROWS)


def test_a_table(tmp_path: Path) -> None:
    found = csv(table(tmp_path, GOOD), group_column="patient")
    assert (
        found.image_targets == ImageLevelTargets("multiclass", ("a", "b"))
        and found.class_names == ("a", "b")
        and not found.errors
    )
    assert [case.id for case in found.cases] == list("012345") and found.modalities == ("grey",)
    assert [case.values for case in found.cases] == [(0.0,), (1.0,), (1.0,), (0.0,), (1.0,), (0.0,)]
    assert [case.split for case in found.cases] == ["train"] * 4 + ["val", "test"]
    assert [case.group for case in found.cases] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert csv(tmp_path / "labels.csv", class_names=["b", "a"]).cases[0].values == (1.0,)
    assert check(found, 1).errors == {}


def test_kinds(tmp_path: Path) -> None:
    text = "path;x;y\nimages/0.png;1;0.5\nimages/1.png;0;-2\n"
    path = table(tmp_path, text)
    numbers = csv(path, label_columns=["x", "y"], target_type="regression")
    assert numbers.image_targets == ImageLevelTargets("regression", ("x", "y")) and numbers.cases[
        1
    ].values == (0.0, -2.0)
    assert csv(
        path, label_columns="y", task="medconv.training.tasks.Regression"
    ).image_targets == ImageLevelTargets("regression", ("y",))
    assert csv(path, label_columns="x").image_targets == ImageLevelTargets("multiclass", ("0", "1"))
    findings = csv(path, label_columns=["x", "y"])
    assert findings.image_targets == ImageLevelTargets("multilabel", ("x", "y"))
    assert findings.errors == {
        "0": "labels.csv, row 2: column 'y' must hold 0 or 1, got '0.5'; data.target_type=regression takes "
        "any number",
        "1": "labels.csv, row 3: column 'y' must hold 0 or 1, got '-2'; data.target_type=regression takes "
        "any number",
    }


def test_a_stem_that_repeats_takes_the_folder_along(tmp_path: Path) -> None:
    for name in ("a/scan.png", "b/scan.png"):
        (tmp_path / name).parent.mkdir()
        write_picture(tmp_path / name, pixels(len(name)))
    (tmp_path / "t.csv").write_text("path,label\na/scan.png,1\nb/scan.png,2\n")
    assert [case.id for case in csv(tmp_path / "t.csv").cases] == ["a_scan", "b_scan"]
    (tmp_path / "t.csv").write_text("path,label\na/scan.png,1\na/scan.png,2\n")
    with pytest.raises(ValueError, match=r"would be one case: .*a/scan\.png, .*a/scan\.png; expected one"):
        csv(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("images/9.png,a,train,p", "images/9.png: no such file"),
        (",a,train,p", "column 'path' is empty, expected an image file"),
        ("images/0.png,,train,p", "column 'label' is empty, expected a label"),
        ("images/0.png,a,later,p", "column 'split' must be train, val or test, got 'later'"),
        ("images/0.png,a,train,", "column 'patient' is empty, expected the name of a group"),
        ("images/0.png,c,train,p", "column 'label': 'c' is not a class; the classes are a, b"),
    ],
)
def test_a_row_at_fault_is_named_by_its_number(tmp_path: Path, row: str, fault: str) -> None:
    text = "path,label,split,patient\nimages/1.png,a,train,q\nimages/2.png,b,val,r\n" + row
    found = csv(table(tmp_path, text), group_column="patient", class_names=["a", "b"])
    (said,) = found.errors.values()
    assert said.startswith("labels.csv, row 4: ") and fault in said
    with pytest.raises(ValueError, match="1 errors in 3 cases"):
        check(found, 1)


def test_a_label_that_is_no_number(tmp_path: Path) -> None:
    found = csv(table(tmp_path, "path,label\nimages/0.png,61\nimages/1.png,old\n"), target_type="regression")
    assert found.errors == {"1": "labels.csv, row 3: column 'label' must hold numbers, got 'old'"}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (
            GOOD,
            {"path_column": "file"},
            r"data\.path_column: .*labels\.csv has no column 'file', it has path, label, split, patient",
        ),
        (
            GOOD,
            {"label_columns": "lable"},
            r"data\.label_columns: .* has no column 'lable'.*did you mean label\?",
        ),
        (GOOD, {"group_column": "subject"}, r"data\.group_column: .* no column 'subject'"),
        (
            GOOD,
            {"target_type": "class"},
            r"data\.target_type must be one of multiclass, multilabel, regression, or null, got 'class'",
        ),
        (
            GOOD,
            {"target_type": "multiclass", "label_columns": ["label", "split"]},
            r"data\.target_type=multiclass takes one of data\.label_columns",
        ),
        ("path,label\n", {}, "expected a row per image, found none"),
        ("path,label\nimages/0.png,a\n", {}, "column 'label' holds a, expected two classes or more"),
        (
            "path,label\n" + "".join(f"images/{i}.png,{i}.5\n" for i in range(101)),
            {},
            "101 different labels .* set task=regression",
        ),
        ("path,label,label\nimages/0.png,a,b\n", {}, "column 'label' is there twice"),
    ],
)
def test_a_table_that_cannot_be_read(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        csv(table(tmp_path, text), **settings)


@pytest.mark.parametrize("make", [csv, imagefolder])
def test_no_root(tmp_path: Path, make: Callable[..., Dataset]) -> None:
    with pytest.raises(ValueError, match=r"data\.root is not set"):
        make(None)
    with pytest.raises(ValueError, match=r"data\.root=.*nowhere"):
        make(tmp_path / "nowhere")


def test_a_binary_file_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"t\.csv: cannot be read as a table"):
        csv(tmp_path / "t.csv")


def class_folder(root: Path, *names: str, shape: tuple[int, ...] = (8, 9)) -> None:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_picture(root / name, pixels(i, shape))


def test_a_folder_per_class(tmp_path: Path) -> None:
    class_folder(tmp_path, "sick/1.png", "sick/2.jpg", "healthy/1.png", shape=(8, 9, 3))
    (tmp_path / "sick/notes.txt").write_text("left out")
    found = imagefolder(tmp_path)
    assert found.image_targets == ImageLevelTargets(
        "multiclass", ("healthy", "sick")
    ) and found.modalities == (
        "red",
        "green",
        "blue",
    )
    assert {case.id: case.values for case in found.cases} == {
        "healthy_1": (0.0,),
        "sick_1": (1.0,),
        "sick_2": (1.0,),
    }
    assert imagefolder(tmp_path, ["sick", "healthy"]).cases[0].values == (1.0,)
    with pytest.raises(
        ValueError, match=r"healthy: its name is not a class; data\.class_names has sick, ill"
    ):
        imagefolder(tmp_path, ["sick", "ill"])
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="other: no image there .* expected those of class other"):
        imagefolder(tmp_path)


def test_parts_above_the_classes(tmp_path: Path) -> None:
    class_folder(tmp_path, "train/a/1.png", "train/b/2.png", "valid/a/3.png", "test/b/4.png")
    found = imagefolder(tmp_path)
    assert [(case.id, case.split, case.values) for case in found.cases] == [
        ("1", "train", (0.0,)),
        ("2", "train", (1.0,)),
        ("3", "val", (0.0,)),
        ("4", "test", (1.0,)),
    ]
    (tmp_path / "flat").mkdir()
    with pytest.raises(ValueError, match="expected a folder for each of two classes or more, found none"):
        imagefolder(tmp_path / "flat")


def npz(path: Path, shape: tuple[int, ...] = (8, 8), wide: int = 1, **changes: Any) -> Path:
    arrays: dict[str, Any] = {}
    for number, (part, count) in enumerate((("train", 6), ("val", 3), ("test", 2))):
        arrays[f"{part}_images"] = pixels(number, (count, *shape))
        arrays[f"{part}_labels"] = (np.arange(count * wide) % 2).reshape(count, wide).astype(np.uint8)
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


@pytest.mark.parametrize(("shape", "channels"), [((8, 8), 1), ((8, 8, 3), 3), ((8, 7, 6), 1)])
def test_medmnist(tmp_path: Path, shape: tuple[int, ...], channels: int) -> None:
    path = npz(tmp_path / "tiny.npz", shape)
    found = medmnist(path, tmp_path / "cache")
    assert (
        found.name == "tiny"
        and found.image_targets == ImageLevelTargets("multiclass", ("0", "1"))
        and len(found.modalities) == channels
    )
    assert [case.split for case in found.cases] == ["test"] * 2 + ["train"] * 6 + ["val"] * 3
    first = next(case for case in found.cases if case.id == "train_00001")
    image, original = read_image(first.images)[0], np.load(path)["train_images"][1]
    assert first.values == (1.0,)
    if len(shape) == 2:
        np.testing.assert_array_equal(image[0, :, ::-1, 0].T, original)
    elif channels == 3:
        np.testing.assert_array_equal(image[:, :, ::-1, 0].transpose(2, 1, 0), original)
    else:
        np.testing.assert_array_equal(image[0], original)
    assert check(found, 1).errors == {}
    before = first.images[0].stat().st_mtime_ns
    assert medmnist(path, tmp_path / "cache") == found and first.images[0].stat().st_mtime_ns == before
    assert [p.name[:5] for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == ["tiny-"]


def test_medmnist_of_findings_and_of_classes_without_an_example(tmp_path: Path) -> None:
    found = medmnist(npz(tmp_path / "f.npz", wide=3), tmp_path / "cache")
    assert found.image_targets == ImageLevelTargets("multilabel", ("finding_0", "finding_1", "finding_2"))
    assert [c.values for c in found.cases if c.split == "train"][:2] == [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0)]
    path = npz(tmp_path / "c.npz", val_labels=np.full((3, 1), 4, np.uint8))
    ordinal = medmnist(path, tmp_path / "cache")
    assert ordinal.image_targets == ImageLevelTargets("multiclass", ("0", "1", "2", "3", "4"))
    named = medmnist(path, tmp_path / "cache", class_names=list("abcde"))
    assert named.class_names == named.image_targets.names == tuple("abcde") and not named.errors
    with pytest.raises(
        ValueError, match=r"data\.class_names needs a name for each of 5 outputs, got \['a'\]"
    ):
        medmnist(path, tmp_path / "cache", class_names=["a"])
    assert medmnist(
        path, tmp_path / "cache", task="medconv.training.tasks.Regression"
    ).image_targets == ImageLevelTargets("regression", ("label",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "no.npz", r"data\.root=.*no\.npz: no such file, expected a MedMNIST file"),
        (
            lambda p: (p / "t.npz").write_text("text") and p / "t.npz",
            r"data\.root=.*t\.npz: not a MedMNIST file, expected \.npz",
        ),
        (lambda p: npz(p / "t.npz", val_labels=None), r"t\.npz: no array val_labels in it"),
        (
            lambda p: npz(p / "t.npz", val_labels=np.zeros((1, 1), np.uint8)),
            r"t\.npz: .*val_labels each, got",
        ),
        (
            lambda p: npz(p / "t.npz", val_labels=np.zeros((3, 1))),
            "val_labels must be whole numbers, got float64",
        ),
        (
            lambda p: npz(p / "t.npz", val_labels=np.array([[{}]] * 3, object)),
            r"t\.npz: not a MedMNIST file \(.*pickle",
        ),
    ],
)
def test_what_is_no_medmnist_file(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        medmnist(make(tmp_path), tmp_path / "cache")
    assert not any((tmp_path / "cache").glob("*/labels.csv"))


def case(name: str, value: float = 0, split: str = "", group: str = "") -> Case:
    return Case(name, (Path(name),), values=(value,), group=group, split=split)


def ids(cases: list[Case]) -> str:
    return " ".join(case.id for case in cases)


def test_the_parts_of_the_dataset_count(caplog: pytest.LogCaptureFixture) -> None:
    cases = [case(str(i), split=part) for i, part in enumerate(["train"] * 4 + ["val", "test"])]
    with caplog.at_level(logging.WARNING):
        assert split_cases(cases, 0, 5) == DataSplit(cases[:4], cases[4:5], cases[5:]) and not caplog.records
        assert split_cases(cases, 3, 5) == split_cases(cases, 0, 5)
    assert "data.fold=3 is not used" in caplog.text
    assert split_cases(cases, "all", 5) == DataSplit(cases[:5], [], cases[5:])


def test_a_fold_of_the_training_part_where_none_is_for_validation() -> None:
    cases = [case(str(i), split="train") for i in range(8)] + [case("8", split="test")]
    parts = split_cases(cases, 1, 4)
    assert len(parts.train) == 6 and len(parts.val) == 2 and ids(parts.test) == "8"


def test_folds_keep_groups_together() -> None:
    cases = [case(f"{i:02d}", group=f"p{i % 4}") for i in range(12)]
    held = [{c.group for c in split_cases(cases, fold, 4).val} for fold in range(4)]
    assert sorted(map(len, held)) == [1, 1, 1, 1] and set.union(*held) == {"p0", "p1", "p2", "p3"}
    for fold in range(4):
        parts = split_cases(cases, fold, 4)
        assert len(parts.val) == 3 and len(parts.train) == 9
    with pytest.raises(ValueError, match="number of groups, 4, got 5"):
        split_cases(cases, 0, 5)


def test_a_group_in_two_parts_is_refused(tmp_path: Path) -> None:
    cases = [
        case("a", split="train", group="p"),
        case("b", split="val", group="p"),
        case("c", split="train", group="q"),
    ]
    with pytest.raises(ValueError, match="group p is in more than one split: a in training, b in validation"):
        split_cases(cases, 0, 5)
    (tmp_path / "s.json").write_text('[{"train": ["a", "c"], "val": ["b"]}]')
    with pytest.raises(ValueError, match="group p is in more than one split"):
        split_cases([case(n, group="q" if n == "c" else "p") for n in "abc"], 0, 5, tmp_path / "s.json")


def test_a_class_without_an_example_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    image_targets = ImageLevelTargets("multiclass", ("no", "yes"))
    check_examples(DataSplit([case("a", 0), case("b", 1)], [case("c", 0), case("d", 1)], []), image_targets)
    with pytest.raises(ValueError, match="no training case has class yes"):
        check_examples(DataSplit([case("a", 0)], [case("c", 0), case("d", 1)], []), image_targets)
    with pytest.raises(ValueError, match="no validation case has class no"):
        check_examples(DataSplit([case("a", 0), case("b", 1)], [case("d", 1)], []), image_targets)
    check_examples(DataSplit([case("a", 0), case("b", 1)], [], []), image_targets)
    findings = ImageLevelTargets("multilabel", ("x", "y"))
    neither, both, second = (Case(str(v), (), values=v) for v in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0)))
    check_examples(DataSplit([both], [neither, second], []), findings)
    assert "no validation case has x" in caplog.text
    with pytest.raises(ValueError, match="no training case has class x"):
        check_examples(DataSplit([second], [neither, second], []), findings)
    for held in ([neither, neither], [second, second]):  # nothing there has an AUC
        with pytest.raises(ValueError, match="no finding has both positive and negative validation cases"):
            check_examples(DataSplit([both], held, []), findings)


def test_counts_and_members() -> None:
    two = [case("a", 0), case("b", 1), case("c", 1)]
    assert class_counts(two, ImageLevelTargets("multiclass", ("x", "y", "z"))) == [1, 2, 0]
    assert indices_by_class(two, ImageLevelTargets("multiclass", ("x", "y", "z"))) == [[0], [1, 2], []]
    found = [Case(str(i), (), values=v) for i, v in enumerate([(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)])]
    assert class_counts(found, ImageLevelTargets("multilabel", ("x", "y"))) == [1, 2]
    assert indices_by_class(found, ImageLevelTargets("multilabel", ("x", "y"))) == [[0], [0, 1], [2]]


def test_copies_of_validation_are_left_out_of_training(caplog: pytest.LogCaptureFixture) -> None:
    parts = DataSplit([case("a"), case("b"), case("c")], [case("v")], [case("t")])
    left = drop_duplicates(parts, {"a": "1", "b": "2", "c": "3", "v": "2", "t": "3"})
    assert ids(left.train) == "a" and ids(left.val) == "v" and ids(left.test) == "t"
    assert (
        "2 images are in training and also in validation or test; skipped in training: b (v), c (t)"
        in caplog.text
    )
    assert drop_duplicates(parts, {}) == parts


def test_volumes_may_stand_in_a_table(tmp_path: Path) -> None:
    for i in range(2):
        save_volume(tmp_path / f"{i}.nii.gz", pixels(i, (4, 5, 6)))
    (tmp_path / "t.csv").write_text("path,label\n0.nii.gz,1\n1.nii.gz,0\n")
    found = csv(tmp_path / "t.csv", modality="CT")
    assert found.modalities == ("CT",) and check(found, 1).fingerprint.shapes == ((4, 5, 6), (4, 5, 6))
