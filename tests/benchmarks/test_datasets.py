"""scripts/benchmarks/datasets.py: generated cases, and a dataset of the user's own, in nnU-Net's layout."""

import json

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny

from benchmarks import datasets
from benchmarks.peers import serving


def test_generated_cases_are_reproducible_and_written_once(tmp_path):
    arguments = (tmp_path, "Small", 1, (12, 20, 16), 2, (1.0, 1.0, 2.0), "CT")
    raw = datasets.generated(*arguments)
    image, label = datasets.volume((12, 20, 16), 1, "CT")
    np.testing.assert_array_equal(nib.load(raw / "imagesTr/case001_0000.nii.gz").get_fdata(), image)
    np.testing.assert_array_equal(nib.load(raw / "labelsTr/case001.nii.gz").get_fdata(), label)
    assert datasets.spacing_of(raw) == (1.0, 1.0, 2.0) and set(np.unique(label)) == {0, 1, 2}
    before = (raw / "imagesTr/case000_0000.nii.gz").stat().st_mtime_ns
    assert datasets.generated(*arguments) == raw
    assert (raw / "imagesTr/case000_0000.nii.gz").stat().st_mtime_ns == before


def test_a_decathlon_dataset_is_linked_not_copied(tmp_path):
    root = tiny.write_dataset(tmp_path / "tiny", cases=4)
    raw = datasets.linked(tmp_path / "scratch", 1, root, 3)
    assert len(list((raw / "imagesTr").iterdir())) == len(serving.files(raw)) == 3
    assert json.loads((raw / "dataset.json").read_text())["labels"] == {"background": 0, "box": 1, "hole": 2}
    assert (raw / "imagesTr/case_0_0000.nii.gz").resolve() == (root / "imagesTr/case_0.nii.gz").resolve()
    meta = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps({**meta, "modality": {"0": "T1", "1": "T2"}}))
    with pytest.raises(ValueError, match="one channel is needed, got .'T1', 'T2'."):
        datasets.linked(tmp_path / "other", 1, root, 3)
