"""`medconv predict`: its options, and errors that name them, before anything is written."""

from pathlib import Path

import pytest
from helpers.members import call

from medconv.cli.predict import parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "error: --workers must be at least 1, got 0"),
        (["--sw-batch-size", "0"], "error: --sw-batch-size must be a whole number of at least 1, got 0"),
        (["--saliency"], "error: --saliency is for classification and regression; "),
        (["--overlap", "1"], "error: --overlap must be at least 0 and below 1, got 1.0"),
        (
            ["--mirror-axes", "2"],
            "error: --mirror-axes=[2] needs a network trained on mirrored images: add [2] to",
        ),
        (
            ["--mirror-axes", "5"],
            "error: --mirror-axes must be different spatial axes from 0 to 2, or `all`, got [5]",
        ),
        (["--source-spacing-mm", "1"], "error: --source-spacing-mm=[1.0]: expected positive numbers of mm"),
        (["--device", "quantum"], "error: --device quantum: cannot be used here"),
        (
            ["--checkpoint", "."],
            "error: .: not the folder of a run, expected RUN or RUN/checkpoints/best.ckpt",
        ),
        (["--checkpoint", "nowhere.ckpt"], "error: nowhere.ckpt: no such checkpoint"),
        (["--postprocess", "nowhere.json"], "error: nowhere.json: cannot be read"),
    ],
)
def test_bad_options_are_one_error_and_write_nothing(exported, tmp_path, monkeypatch, capsys, words, message):
    assert call(monkeypatch, exported.checkpoint, exported.images, "--output", tmp_path / "out", *words) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_input_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, Path("nowhere.ckpt"), tmp_path / "gone", "--output", tmp_path / "out") == 1
    assert capsys.readouterr().err == f"error: --input {tmp_path}/gone: no such file or folder\n"


@pytest.mark.parametrize("name", ["case_0.nii.gz", "predictions.csv"])
def test_a_file_is_no_folder_of_predictions(name, tmp_path, monkeypatch, capsys):
    """Else it would become a folder of that name."""
    assert call(monkeypatch, Path("nowhere.ckpt"), tmp_path, "--output", tmp_path / name) == 1
    assert f"error: --output {tmp_path / name}: names a file, expected a folder" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_other_results_are_refused_by_the_names_of_the_flags(exported, tmp_path, monkeypatch, capsys):
    image = exported.images / "case_0.nii.gz"
    words = ("--output", tmp_path / "out")
    assert call(monkeypatch, exported.checkpoint, image, *words) == 0
    assert call(monkeypatch, exported.checkpoint, image, *words, "--overlap", "0") == 1
    assert capsys.readouterr().err == (
        f"error: --output {tmp_path}/out: holds results made with other settings (overlap: [0.5] there, [0.0] "
        "now); take another folder, or --overwrite to replace them\n"
    )
    assert call(monkeypatch, exported.checkpoint, image, "--output", exported.images) == 1
    assert f"error: --output {exported.images}: holds the images themselves" in capsys.readouterr().err
    assert call(monkeypatch, exported.checkpoint, exported.images, "--output", exported.images) == 1
    assert f"error: --output {exported.images}: is the folder of the images" in capsys.readouterr().err


def test_options_have_the_usual_names():
    arguments = "--checkpoint a --package x --package y --input i --output o --save-probabilities"
    options = parser().parse_args([*arguments.split(), "--sw-batch-size", "3"])
    assert options.package == ["x", "y"] and options.save_probabilities and options.sw_batch_size == 3


def test_checkpoints_may_be_repeated():
    arguments = "--checkpoint a b --checkpoint c --input i --output o"
    options = parser().parse_args(arguments.split())
    assert [path.name for path in options.checkpoint] == list("abc")
