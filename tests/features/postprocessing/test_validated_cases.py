"""medconv/features/postprocessing/validated_cases.py: layouts that a config may name; the command's test has the rest."""

import nibabel as nib
import numpy as np
import pytest

from medconv.config import ConfigError
from medconv.features.postprocessing.validated_cases import dataset_of


@pytest.mark.parametrize("target", ["os.path.join", "medconv.features.joined.layout.joined", None])
def test_a_function_that_is_no_layout_is_refused(target):
    with pytest.raises(ConfigError, match=rf"^data\.layout\._target_={target} is refused"):
        dataset_of({"data": {"layout": {"_target_": target}}}, trusted=["mine"])


def test_a_layout_takes_plain_values_alone():
    layout = {"_target_": "medconv.data.datasets.dataset_json.msd", "root": {"_target_": "os.getcwd"}}
    with pytest.raises(ConfigError, match=r"^data\.layout\.root.*os\.getcwd is refused"):
        dataset_of({"data": {"layout": layout}}, trusted=())


def test_the_layout_of_a_config_may_have_several_channels(tmp_path):
    for name in ("a_t1", "a_t2", "a_seg"):
        nib.save(nib.Nifti1Image(np.ones((4, 4, 4), np.uint8), np.eye(4)), tmp_path / f"{name}.nii.gz")
    images = {name: f"{tmp_path}/{{id}}_{name}.nii.gz" for name in ("t1", "t2")}
    target = "medconv.data.datasets.folder.folder"
    layout = {"_target_": target, "images": images, "labels": f"{tmp_path}/{{id}}_seg.nii.gz"}
    dataset = dataset_of({"data": {"layout": layout}}, [])
    assert dataset.modalities == ("t1", "t2") and [len(case.images) for case in dataset.cases] == [2]


def test_an_argument_of_a_layout_is_named_by_its_key(tmp_path):
    layout = {"_target_": "medconv.data.datasets.folder.folder", "images": {}, "labels": None}
    with pytest.raises(ConfigError, match=r"^data\.images"):
        dataset_of({"data": {"layout": layout}}, trusted=())
