"""Training on cases of which some lack a channel, as a user does, and prediction without it."""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.two_contrasts import write_two_contrasts

import medconv
from medconv.config import ConfigError
from medconv.utils import checkpoint_io


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("contrasts")
    write_two_contrasts(root / "data")
    tiny.train(
        root / "data",
        root / "run",
        "data=nnunet",
        "data.missing=allow",
        "data.channel_dropout=0.5",
        "data.normalisation=dataset",
        "data.on_invalid_case=raise",
    )
    return root


def test_cases_without_a_channel_are_trained_on_and_validated(trained):
    summary = json.loads((trained / "run/summary.json").read_text())
    assert not summary["skipped_cases"]
    content = checkpoint_io.read(trained / "run/checkpoints/best.ckpt")["medconv"]
    lacking = {"case_1", "case_4"}
    assert lacking <= {*content["train_cases"], *content["validation"]}
    # the zeros of missing channels are no intensities of the dataset
    statistics = content["preprocessing"]["intensities"]
    assert statistics[1]["mean"] == pytest.approx(6, abs=0.1) and statistics[1]["percentile_00_5"] > 5


def test_prediction_without_a_channel_warns_once_and_equals_a_channel_of_0(
    trained, tmp_path, monkeypatch, capfd
):
    checkpoint = trained / "run/checkpoints/best.ckpt"
    arguments = (
        "--checkpoint",
        checkpoint,
        "--input",
        trained / "data/imagesTr",
        "--output",
        tmp_path / "out",
    )
    assert tiny.call(monkeypatch, "predict", *arguments) == 0
    printed = " ".join("".join(capfd.readouterr()).split())
    assert printed.count("FLAIR") == 1 and "2 of 6 cases lack FLAIR: case_1, case_4" in printed
    assert len(list((tmp_path / "out").glob("case_*.nii.gz"))) == 6
    predictor = medconv.load(checkpoint)
    t1 = trained / "data/imagesTr/case_1_0000.nii.gz"
    label = np.asarray(nib.load(tmp_path / "out/case_1.nii.gz").dataobj)
    np.testing.assert_array_equal(predictor(t1, None), label)
    prepared = predictor._input_of([t1, None], None, None).arrays[0]
    assert prepared.shape[0] == 2 and prepared[0].std() > 0.1 and not prepared[1].any()
    # the same by a list, and by the name of one file
    (tmp_path / "list.json").write_text(
        json.dumps({"listed": [None, str(t1).replace("case_1_0000", "case_0_0001")]})
    )
    for number, source in enumerate((tmp_path / "list.json", t1)):
        call = ("--checkpoint", checkpoint, "--input", source, "--output", tmp_path / f"out{number}")
        assert tiny.call(monkeypatch, "predict", *call) == 0
    np.testing.assert_array_equal(np.asarray(nib.load(tmp_path / "out1/case_1.nii.gz").dataobj), label)


def test_without_the_setting_such_cases_are_errors(trained, tmp_path):
    shutil.copytree(trained / "data", tmp_path / "data")
    with pytest.raises(
        ValueError, match=r"case case_1: .*expected channels 0 to 1 of every case, found \[0\]"
    ):
        tiny.train(tmp_path / "data", tmp_path / "run", "data=nnunet")
    with pytest.raises(ConfigError, match="data.channel_dropout=0.1 needs data.missing=allow"):
        tiny.train(
            trained / "data",
            tmp_path / "run",
            "data=nnunet",
            "data.channel_dropout=0.1",
            "data.on_invalid_case=skip",
        )
    for path in (tmp_path / "data/imagesTr").glob("*_0001.nii.gz"):
        path.unlink()
    with pytest.raises(ValueError, match="data.missing=allow: no case has the channel FLAIR"):
        tiny.train(tmp_path / "data", tmp_path / "run", "data=nnunet", "data.missing=allow")


def test_a_network_that_needs_all_channels_names_the_missing_one(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained / "data", tmp_path / "data")
    tiny.train(
        trained / "data", tmp_path / "run", "data=nnunet", "data.on_invalid_case=skip", "trainer.max_steps=1"
    )
    predictor = medconv.load(tmp_path / "run/checkpoints/best.ckpt")
    with pytest.raises(
        ValueError, match=r"FLAIR is missing, and .*best.ckpt was not trained with data.missing=allow"
    ):
        predictor(trained / "data/imagesTr/case_1_0000.nii.gz", None)
    images = trained / "data/imagesTr"
    call = ("--checkpoint", tmp_path / "run/checkpoints/best.ckpt", "--input", images)
    assert tiny.call(monkeypatch, "predict", *call, "--output", tmp_path / "out") == 1
    assert "case case_1: " in capsys.readouterr().err
    predicted = {path.name for path in (tmp_path / "out").glob("case_*.nii.gz")}
    whole = {path.name.replace("_0001", "") for path in images.glob("*_0001.nii.gz")}
    assert predicted == whole and "case_1.nii.gz" not in predicted
