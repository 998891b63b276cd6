"""Capturing a network: the divisor of its sizes, and networks with other divisors or of MONAI."""

import json

import pytest
import torch
from helpers import exports, tiny
from monai.networks.nets import DynUNet

from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.export import export
from medconv.features.export.graph import divisor_of
from medconv.features.export.job import ExportOptions
from medconv.features.export.metadata import metadata_path
from medconv.inference.load import load


def test_the_divisor_is_the_stride_of_the_coarsest_convolution():
    strides = [1, (2, 2, 1), 2]
    network = DynUNet(3, 1, 2, [3] * 3, strides, strides[1:], filters=[2, 3, 4])
    assert divisor_of(network, torch.randn(1, 1, 16, 16, 8)) == (4, 4, 2)
    # A mean over the image has one voxel, which is no resolution of the network.
    excitation = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 2, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Conv2d(2, 2, 1)
    )
    assert divisor_of(excitation, torch.randn(1, 1, 8, 8)) == (2, 2)
    # Without padding it becomes smaller, but has no stride
    assert divisor_of(torch.nn.Conv2d(1, 2, 3), torch.randn(1, 1, 8, 14)) == (1, 1)
    # It rounds 14 / 4 down, so that nothing is known about other sizes
    rounding = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 1), torch.nn.MaxPool2d(2), torch.nn.MaxPool2d(2), torch.nn.Conv2d(2, 2, 1)
    )
    assert divisor_of(rounding, torch.randn(1, 1, 8, 14)) == (4, 14)


def test_an_equivariant_network_with_batch_norms_and_another_divisor_per_axis(tmp_path):
    settings = ("conv=mirror", "model.norm=batch", "model.strides=[[2,2,1]]", "data.patch_size=[16,16,12]")
    images, checkpoint = exports.train(tmp_path, *settings)
    options = ExportOptions("torchscript", case=images / "case_0.nii.gz")
    export.export(checkpoint, tmp_path / "m.ts", options)
    model = exports.read_back(tmp_path / "m.ts", "torchscript")
    assert model.equivariant_axes == (0,) and model.seen_axes == (0, 1)
    assert load(checkpoint, mirror_axes=[0, 1]).window.mirror_axes == (1,)
    metadata = json.loads(metadata_path(tmp_path / "m.ts").read_text())
    assert metadata["inputs"]["divisor"] == [2, 2, 1] and isinstance(model.preprocessing, PreprocessingConfig)


# DynUNet needs three stages, SegResNet an edge divisible by 8.
SETTINGS = {
    "monai_unet": ["plan.max_stages=2"],
    "dynunet": ["plan.max_stages=3", "data.patch_size=[16,16,16]"],
    "segresnet": ["plan.max_stages=2", "data.patch_size=[16,16,16]"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("format", exports.FORMATS)
def test_networks_of_monai_are_exported(tmp_path, name, format):
    dataset = tiny.write_dataset(tmp_path / "data")
    small = [word for word in tiny.SMALL if not word.startswith("model.")]
    from medconv import config
    from medconv.training import run
    from medconv.training.run_dir import RunDir

    overrides = [
        "data=msd",
        f"data.root={dataset}",
        f"data.cache_dir={tmp_path / 'c'}",
        *small,
        f"model={name}",
        "trainer.max_steps=1",
    ]
    words = (*overrides, *SETTINGS[name], f"run.dir={tmp_path / 'run'}")
    checked = config.validate(tiny.composed(*words))
    run.train(checked, RunDir.of(checked, {}))
    options = ExportOptions(format, case=dataset / "imagesTr/case_0.nii.gz")
    export.export(tmp_path / "run/checkpoints/last.ckpt", tmp_path / "m", options)
    assert exports.read_back(tmp_path / "m", format).network is not None
