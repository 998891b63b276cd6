"""A CT that is stored with another offset or unit is named in the check and in a prediction."""

import json

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny

FAR = 3  # the case that is stored otherwise


def write(root, change=None):
    """CT-like volumes from air to bone; the values of one case are changed."""
    dataset = tiny.write_dataset(root, cases=6)
    for index in range(6):
        path = dataset / f"imagesTr/case_{index}.nii.gz"
        image = nib.load(path)
        values = np.asarray(image.dataobj) * 300 - 300 + 10 * index
        values[..., -6:] = -1000  # air
        if change is not None and index == FAR:
            values = change(values)
        nib.save(nib.Nifti1Image(values.astype(np.float32), image.affine), path)
    content = json.loads((dataset / "dataset.json").read_text())
    (dataset / "dataset.json").write_text(json.dumps({**content, "modality": {"0": "CT"}}))
    return dataset


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run on usual values."""
    folder = tmp_path_factory.mktemp("usual")
    tiny.train(write(folder / "data"), folder / "run")
    return folder / "run/checkpoints/best.ckpt"


CHANGES = {
    "usual": (None, False),
    "too high": (lambda values: values + 1024, True),
    "scaled": (lambda values: (values + 1000) / 4000, True),
}


@pytest.mark.parametrize(("change", "warns"), CHANGES.values(), ids=CHANGES)
def test_a_case_far_from_all_others_is_named(change, warns, trained, tmp_path, monkeypatch, capsys):
    dataset = write(tmp_path / "data", change)
    checked = [f"data.root={dataset}", f"data.cache_dir={tmp_path / 'cache'}", "data=msd"]
    assert tiny.call(monkeypatch, "preprocess", "--check-only", *checked) == 0
    shown = capsys.readouterr().out
    assert (f"warning: case case_{FAR}: most values are from " in shown) == warns
    assert ("normalisation=ct does not adapt to that" in shown) == warns
    images = dataset / "imagesTr"
    predicting = ("--checkpoint", trained, "--input", images, "--output", tmp_path / "out")
    assert tiny.call(monkeypatch, "predict", *predicting) == 0
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if "in training from -1000 to" in line]
    assert len(lines) == warns
    assert all(f"case case_{FAR}: most values are from" in line for line in lines)


def test_a_normalisation_that_adapts_has_no_warning(tmp_path, monkeypatch, capsys):
    dataset = write(tmp_path / "data", CHANGES["too high"][0])
    checked = [f"data.root={dataset}", f"data.cache_dir={tmp_path / 'cache'}", "data=msd"]
    assert tiny.call(monkeypatch, "preprocess", "--check-only", *checked, "data.normalisation=zscore") == 0
    assert "most values" not in capsys.readouterr().out
