"""MONAI bundles: MONAI runs them without medconv, and gets our label maps."""

import json

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import exports, ranks
from monai.bundle import ConfigParser, verify_net_in_out

from medconv.data.case import Grid
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_image
from medconv.features.export import bundle_documents, export
from medconv.features.export.job import ExportOptions
from medconv.features.export.monai_bundle import _inferer, _normalisation, _postprocessing, _preprocessing
from medconv.inference.predictor import Predictor
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets.regions import RegionTargets

pytest.importorskip("ignite")
pytest.importorskip("fire")


@pytest.fixture(scope="module")
def bundle(exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    export.export(exported.checkpoint, folder, ExportOptions("bundle"))
    return folder


def run(bundle, images, output):
    """As the bundle's README says."""
    configs = ("--config_file", "configs/inference.json", "--meta_file", "configs/metadata.json")
    folders = ("--bundle_root", ".", "--dataset_dir", str(images), "--output_dir", str(output))
    process = ranks.python("-m", "monai.bundle", "run", *configs, *folders, cwd=bundle)
    assert process.returncode == 0, process.stdout + process.stderr


def test_monai_runs_a_bundle_and_gets_our_label_maps(exported, bundle, tmp_path):
    images, checkpoint, _ = exported
    run(bundle, images, tmp_path)
    predictor = Predictor.load([checkpoint])
    for path in sorted(images.iterdir()):
        monai_label, label = nib.load(tmp_path / path.name), predictor(path)
        np.testing.assert_allclose(monai_label.affine, nib.load(path).affine, atol=1e-6)
        assert monai_label.shape == label.shape and len(np.unique(label)) > 1
        # The images have the network's spacing, so nothing is interpolated.
        assert (np.asarray(monai_label.dataobj) != label).mean() < 1e-3


def test_label_maps_agree_for_another_spacing_and_orientation(exported, bundle, tmp_path, monkeypatch):
    """Axes in another order and direction, and zeros around the content.

    MONAI keeps the exact spacing, medconv a whole number of voxels between the edges, which moves borders on
    18 voxels: Dice 0.93 and 0.89 here. On a wrong grid the classes would not overlap at all.
    """
    array = nib.load(exported.images / "case_1.nii.gz").get_fdata().astype(np.float32)
    affine = np.array([[0, -1.2, 0, 3], [1.3, 0, 0, 4], [0, 0, 1.7, 5], [0, 0, 0, 1]])
    (tmp_path / "images").mkdir()
    path = tmp_path / "images/odd.nii.gz"
    nib.save(nib.Nifti1Image(np.pad(array, ((1, 2), (0, 3), (2, 0))), affine), path)
    monkeypatch.chdir(bundle)
    monai.bundle.run(
        config_file="configs/inference.json",
        meta_file="configs/metadata.json",
        bundle_root=".",
        dataset_dir=str(path.parent),
        output_dir=str(tmp_path / "out"),
    )
    monai_image, label = nib.load(tmp_path / "out/odd.nii.gz"), Predictor.load([exported.checkpoint])(path)
    np.testing.assert_allclose(monai_image.affine, affine, atol=1e-6)
    monai_label = np.asarray(monai_image.dataobj)
    for value in (1, 2):
        a, b = monai_label == value, label == value
        assert b.any() and 2 * (a & b).sum() / (a.sum() + b.sum()) > 0.8
    assert not monai_label[0].any() and not monai_label[:, -3:].any()


def test_the_metadata_has_the_keys_of_the_schema(bundle):
    meta = json.loads((bundle / "configs/metadata.json").read_text())
    versions = {"version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version"}
    assert versions | {"schema"} | {
        "task",
        "description",
        "authors",
        "copyright",
        "network_data_format",
    } <= set(meta)
    formats = meta["network_data_format"]
    for tensor in (*formats["inputs"].values(), *formats["outputs"].values()):
        assert {"type", "format", "num_channels", "spatial_shape", "dtype", "value_range"} <= set(tensor)
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert names == {
        *("configs/inference.json", "configs/metadata.json", "docs/README.md"),
        *("models/model.ts", "models/model.ts.json"),
    }


def test_the_network_takes_the_shapes_of_the_metadata(bundle, monkeypatch):
    monkeypatch.chdir(bundle)
    verify_net_in_out("network", "configs/metadata.json", "configs/inference.json", device="cpu", n=4)


def test_the_network_of_a_bundle_is_a_torchscript_file_with_metadata(exported, bundle):
    image = exported.images / "case_0.nii.gz"
    label = Predictor([exports.read_back(bundle / "models/model.ts", "torchscript")])(image)
    assert (label != Predictor.load([exported.checkpoint])(image)).mean() < 1e-3


@pytest.mark.parametrize(
    "names",
    [
        *((name, name) for name in ("zscore", "rescale", "none", "dataset")),
        *(("ct", "zscore"), ("rescale", "none"), ("zscore", "dataset")),
    ],
)
def test_the_bundle_normalises_as_medconv(names):
    statistics = {"percentile_00_5": -1.0, "percentile_99_5": 1.5, "mean": 0.2, "std": 0.7}
    preprocessing = PreprocessingConfig(3, (1.0, 1.0, 1.0), names, (statistics, statistics))
    image = np.random.default_rng(0).normal(0, 2, (2, 6, 5, 4)).astype(np.float32)
    config = {
        "imports": ["$import torch"],
        "all": {"_target_": "Compose", "transforms": _normalisation(preprocessing)},
    }
    expected, _ = preprocess_image(image, Grid.of(image.shape[1:], np.eye(4)), preprocessing)
    transform = ConfigParser(config).get_parsed_content("all")
    normalised = transform({"image": torch.from_numpy(image)})["image"]
    np.testing.assert_allclose(np.asarray(normalised), expected, atol=1e-5)


def test_a_channel_of_one_value_is_normalised_as_medconv():
    constant = {"percentile_00_5": 2.0, "percentile_99_5": 2.0, "mean": 2.0, "std": 0.0}
    preprocessing = PreprocessingConfig(3, (1.0, 1.0, 1.0), ("dataset", "ct"), (constant, constant))
    image = np.full((2, 3, 4, 5), 2, np.float32)
    config = {"imports": ["$import torch"], "all": _normalisation(preprocessing)[0]}
    normalised = ConfigParser(config).get_parsed_content("all")({"image": torch.from_numpy(image)})["image"]
    np.testing.assert_array_equal(np.asarray(normalised), 0)


@pytest.mark.parametrize("slice_axis", [0, 1, 2])
def test_slices_keep_their_distance_and_have_their_own_windows(slice_axis):
    preprocessing = PreprocessingConfig(2, (0.5, 2.0), ("none",), ({},), slice_axis=slice_axis)
    pixdim = _preprocessing(preprocessing)[-1]["pixdim"]
    assert pixdim == [*(0.5, 2.0)[:slice_axis], -1, *(0.5, 2.0)[slice_axis:]]
    sizes = []

    def network(windows):
        sizes.append(tuple(windows.shape[1:]))
        return windows.clone()

    image = torch.rand(1, 1, *(4, 9)[:slice_axis], 3, *(4, 9)[slice_axis:])
    window = SlidingWindow((4, 6), overlap=0.75, batch_size=1, slice_axis=slice_axis)
    inferer = ConfigParser({"inferer": _inferer(window)}).get_parsed_content("inferer")
    torch.testing.assert_close(inferer(image, network), image)
    assert sizes == [(1, 4, 6)] * 3 * 4  # 3 slices, windows that begin at 0, 1, 2 and 3


def test_the_bundle_decodes_regions_as_medconv():
    targets = RegionTargets(("a", "b", "c"), ((1, 2, 3), (2, 3), (3,)), None, (1, 2, 3))
    logits = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    config = {"imports": ["$import torch", "$import numpy"], "decode": _postprocessing(targets)[1]}
    label = ConfigParser(config).get_parsed_content("decode")({"pred": logits})["pred"]
    assert torch.equal(torch.as_tensor(label[0]).to(torch.int16), targets.decode(logits))


def test_an_open_size_is_an_expression_and_a_fixed_one_a_number():
    metadata = {
        "inputs": {"divisor": [4, 8], "dynamic": {"spatial": [True, False]}},
        "windows": {"patch_size": [16, 12]},
    }
    assert bundle_documents._spatial_shape(metadata) == ["4 * n", 12]


def test_channels_are_numbered():
    image = bundle_documents._data_format("magnitude", ["4 * n", 12], ["T1", "FLAIR"])
    assert image["num_channels"] == 2 and image["channel_def"] == {0: "T1", 1: "FLAIR"}
    assert image["spatial_shape"] == ["4 * n", 12]
