"""`medconv predict` in this process: lists of cases, what it writes, and what a user meets with odd input."""

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import members
from helpers.members import call

from medconv.cli.predict import parser
from medconv.inference import predict
from medconv.inference.inputs import find_cases
from medconv.inference.load import load
from medconv.inference.postprocessing import Step, Steps
from medconv.inference.predictor import Predictor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return members.train(tmp_path_factory.mktemp("command"))


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def test_what_is_written(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, checkpoint = made
    other = members.variant(checkpoint, tmp_path / "other.ckpt")
    output = tmp_path / "out"
    assert (
        call(
            monkeypatch, checkpoint, images, "--output", output, "--save-probabilities", "--checkpoint", other
        )
        == 0
    )
    record = json.loads((output / "prediction.json").read_text())
    assert record["class_names"] == ["background", "box", "hole"] and record["targets"]["names"] == [
        "box",
        "hole",
    ]
    assert record["checkpoint"] == str(checkpoint) and record["checkpoints"] == [str(checkpoint), str(other)]
    assert record["settings"]["overlap"] == [0.5, 0.5] and len(record["settings"]["checkpoints"]) == 2
    predictor = Predictor.load([checkpoint, other])
    for i in range(7):
        image, label, chances = (
            nib.load(p / f"case_{i}.nii.gz") for p in (images, output, output / "probabilities")
        )
        np.testing.assert_array_equal(np.asarray(label.dataobj), predictor(images / f"case_{i}.nii.gz"))
        assert chances.shape == (*image.shape, 3) and chances.get_data_dtype() == np.float32
        np.testing.assert_array_equal(chances.affine, image.affine)
        np.testing.assert_array_equal(np.asarray(chances.dataobj).argmax(-1), np.asarray(label.dataobj))
        assert record["cases"][f"case_{i}"]["images"] == [str(images / f"case_{i}.nii.gz")]


def test_post_processing_is_applied_and_remembered(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images, checkpoint = made
    predictor = Predictor.load([checkpoint])
    steps = Steps((Step("remove_small", "box", 1e6),), predictor.targets)
    (file := tmp_path / "steps.json").write_text(
        json.dumps({"targets": predictor.targets.plain(), "steps": [step.plain() for step in steps.steps]})
    )
    path, output = images / "case_0.nii.gz", tmp_path / "out"
    assert call(monkeypatch, checkpoint, path, "--output", output, "--postprocess", file) == 0
    plain, grid = predictor(path), predictor.read(find_cases(path, 1)[0]).crop.grid
    wanted = steps.apply(plain, grid, predictor.targets)
    np.testing.assert_array_equal(voxels(output / path.name), wanted)
    assert (wanted != plain).any()
    assert call(monkeypatch, checkpoint, path, "--output", output) == 1
    assert "postprocess" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["txt", "json array", "json object"])
def test_lists_of_cases(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shutil.copy(made[0] / "case_0.nii.gz", tmp_path / "near.nii.gz")
    far = str(made[0] / "case_1.nii.gz")
    source = tmp_path / ("list.txt" if kind == "txt" else "list.json")
    content = {"json array": ["near.nii.gz", [far]], "json object": {"first": "near.nii.gz", "second": [far]}}
    source.write_text(f"# two\nnear.nii.gz\n\n{far}\n" if kind == "txt" else json.dumps(content[kind]))
    assert call(monkeypatch, made[1], source, "--output", tmp_path / "out") == 0
    names = {"first", "second"} if kind == "json object" else {"near", "case_1"}
    assert {path.name.removesuffix(".nii.gz") for path in (tmp_path / "out").glob("*.nii.gz")} == names


def test_channels_in_lists_and_beside_a_file(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a_0000.nii.gz\ta_0001.nii.gz\nb.nii.gz\n")
    found = find_cases(tmp_path / "list.txt", 2)
    assert [(case.id, [path.name for path in case.images]) for case in found] == [
        ("a", ["a_0000.nii.gz", "a_0001.nii.gz"]),
        ("b", ["b.nii.gz"]),
    ]
    for number in range(2):
        (tmp_path / f"a_{number:04d}.nii.gz").touch()
    (case,) = find_cases(tmp_path / "a_0000.nii.gz", 2)
    assert (case.id, len(case.images)) == ("a", 2)
    with members.refused(r"the network takes 3 channels, a_0002\.nii\.gz is not there"):
        find_cases(tmp_path / "a_0000.nii.gz", 3)


def test_a_case_has_one_name_however_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "p_0000.nii.gz"
    path.touch()
    (tmp_path / "list.txt").write_text(
        f"\ufeff{path.name}\n", encoding="utf-8"
    )  # with the mark that Windows puts there
    (tmp_path / "list.json").write_text(f'\ufeff["{path.name}"]', encoding="utf-8")
    for source in (tmp_path, path, tmp_path / "list.txt", tmp_path / "list.json"):
        assert [(case.id, case.images) for case in find_cases(source, 1)] == [("p", (path,))]
    (tmp_path / "p_0001.nii.gz").touch()
    with members.refused(r"every case needs channels 0 to 0: p has \[0, 1\]"):
        find_cases(tmp_path, 1)
    path.unlink()
    assert [case.id for case in find_cases(tmp_path, 1)] == ["p_0001"]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.json", "{", "a.json: not JSON"),
        ("a.json", "3", "a.json: expected an array of cases, or an object of case id to files"),
        ("a.json", "[[]]", "a case is a path, or an array of paths, one per channel; got []"),
        ("a.json", '{"a": 3}', "a case is a path, or an array of paths, one per channel; got 3"),
        ("a.json", '{"../a": "x.nii"}', "a case id names a file, of at most 200 bytes, and cannot be '../a'"),
        ("a.json", '{"": "x.nii"}', "and cannot be ''"),
        ("a.json", '["/"]', "and cannot be ''"),
        ("a.json", r'{"a\u0000": "x.nii"}', r"and cannot be 'a\x00'"),
        ("a.json", r'{"\ud800": "x.nii"}', r"and cannot be '\ud800'"),
        ("a.json", json.dumps({"é" * 150: "x.nii"}), "and cannot be 'éé"),
        ("a.json", '{"a": "x.nii", "a": "y.nii"}', "a.json: two cases are called a"),
        ("a.json", '["x/a.nii", "y/a.nii"]', "two cases are called a; a JSON object gives them ids"),
        ("a.txt", "# nothing\n", "a.txt: no case in it"),
    ],
)
def test_odd_lists(tmp_path: Path, name: str, content: str, wanted: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        find_cases(tmp_path / name, 1)
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--workers", "0"], "error: --workers must be at least 1, got 0"),
        (["--overlap", "1"], "error: --overlap must be at least 0 and below 1, got 1.0"),
        (
            ["--mirror-axes", "2"],
            "error: --mirror-axes=[2] needs a network trained on mirrored images: add [2] to",
        ),
        (["--mirror-axes", "5"], "error: --mirror-axes must be different spatial axes from 0 to 2, got [5]"),
        (["--device", "quantum"], "error: --device quantum: cannot be used here"),
        (["--checkpoint", "nowhere.ckpt"], "error: nowhere.ckpt: no such checkpoint"),
        (["--postprocess", "nowhere.json"], "error: nowhere.json: cannot be read"),
    ],
)
def test_odd_options(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    wanted: str,
) -> None:
    assert call(monkeypatch, made[1], made[0], "--output", tmp_path / "out", *words) == 1
    said = capsys.readouterr().err
    assert wanted in said and "Traceback" not in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_of_files_may_come_again() -> None:
    words = "--checkpoint a b --checkpoint c --exported-model d --exported-model e --input i --output o"
    given = parser().parse_args(words.split(" "))
    assert [path.name for path in (*given.checkpoint, *given.exported_model)] == list("abcde")


def test_cases_that_fail_are_named_and_the_rest_is_done(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Among them what runs out of memory, and what is our own bug; the next start does what lacks."""
    images = tmp_path / "images"
    shutil.copytree(made[0], images)
    (images / "case_1.nii.gz").write_bytes(b"damaged")
    array = voxels(made[0] / "case_2.nii.gz")
    nib.save(nib.Nifti1Image(np.stack([array, array], -1), np.eye(4)), images / "case_2.nii.gz")
    nib.save(nib.Nifti1Image(array[..., :1], np.eye(4)), images / "case_3.nii.gz")
    errors = [MemoryError("Unable to allocate 9 TiB"), TypeError("what?")]
    scores = Predictor.scores

    def unlucky(self: Predictor, given) -> object:
        if given.case.id in ("case_4", "case_5") and errors:
            raise errors.pop(0)
        return scores(self, given)

    monkeypatch.setattr(Predictor, "scores", unlucky)
    monkeypatch.setitem(predict._BAR, "disable", False)  # as on a terminal
    assert call(monkeypatch, made[1], images, "--output", tmp_path / "out") == 1
    said, err = capsys.readouterr()
    assert "2 of 7 predictions are in" in said and "Traceback" in said + err
    for line in (
        "error: 5 of 7 cases could not be predicted",
        "  case case_1: ",
        f"  case case_2: {images}/case_2.nii.gz: the network was trained on 1 channels (MRI), found 2",
        f"  case case_3: {images}/case_3.nii.gz: the network is 3D, the image has shape (16, 18, 1)",
        "  case case_4: out of memory (MemoryError: Unable to allocate 9 TiB); try --sw-batch-size "
        "1, --device cpu, or fewer --workers",
        "  case case_5: TypeError: what? (a bug in medconv, please report it with the lines above)",
    ):
        assert line in err
    assert {p.name for p in (tmp_path / "out").glob("*.nii.gz")} == {"case_0.nii.gz", "case_6.nii.gz"}
    for i in range(1, 6):
        shutil.copy(made[0] / f"case_{i}.nii.gz", images)
    assert call(monkeypatch, made[1], images, "--output", tmp_path / "out") == 0
    said, err = capsys.readouterr()
    assert "7 of 7 predictions are in" in said and "5 made now, 2 before" in said
    assert "100%" in err and "7/7" in err  # the bar counts those that were there, too


def test_a_spacing_far_from_training_is_warned_of(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "far.nii.gz"
    nib.save(nib.Nifti1Image(voxels(made[0] / "case_0.nii.gz"), np.diag([1.0, 1.5, 9.0, 1.0])), path)
    assert call(monkeypatch, made[1], path, "--output", tmp_path / "out") == 0
    wanted = (
        "warning: case far: its spacing, 1 x 1.5 x 9 mm (right, anterior, superior), is far from "
        "that of training"
    )
    assert wanted in "".join(capsys.readouterr())


def test_a_loaded_network_is_that_of_run(made: tuple[Path, Path]) -> None:
    model = load(made[1])
    assert model.spacing_range_mm == ((1.0, 1.0), (1.5, 1.5), (2.0, 2.0)) and model.path == made[1]
    assert not any(
        isinstance(module, torch.nn.Dropout) and module.training for module in model.network.modules()
    )
