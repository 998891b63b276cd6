"""`medconv export` and `medconv predict --exported-model`: what is in the files, that they say what the
checkpoint says, and bad input.
"""

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import exports, tiny
from helpers.exports import Exported

from medconv.convs import fold_convs
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.export import export
from medconv.export.formats import OPSETS
from medconv.export.metadata import _inputs
from medconv.inference import load as inference_load
from medconv.inference.exported.load import load
from medconv.inference.exported.metadata import digest, metadata_path
from medconv.inference.predictor import Predictor


def refusal(monkeypatch, capsys, *words: object) -> str:
    capsys.readouterr()
    assert tiny.call(monkeypatch, *words) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("error:") == 1 and len(said.strip().splitlines()) == 1, said
    return said


@pytest.mark.parametrize("format", exports.FORMATS)
def test_the_file_says_what_the_checkpoint_says_for_any_batch_and_size(
    exported: Exported, format: str
) -> None:
    model, other = inference_load.load(exported.checkpoint), exports.read_back(exported.files[format], format)
    for batch, size in ((1, (16, 16, 12)), (3, model.window.patch_size), (2, (8, 20, 4))):
        image = torch.randn(batch, 1, *size, generator=torch.Generator().manual_seed(batch))
        with torch.inference_mode():
            wanted, got = model.network(image), other.network(image)
        assert got.shape == wanted.shape == (batch, 3, *size) and wanted.std() > 0.01
        assert (got - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("format", exports.FORMATS)
def test_the_metadata_is_all_that_prediction_needs(exported: Exported, format: str) -> None:
    path = exported.files[format]
    metadata, model, other = (
        json.loads(metadata_path(path).read_text()),
        inference_load.load(exported.checkpoint),
        exports.read_back(path, format),
    )
    assert (other.preprocessing, other.window, other.targets) == (
        model.preprocessing,
        model.window,
        model.targets,
    )
    assert (other.class_names, other.modalities) == (model.class_names, model.modalities)
    assert (other.spacing_range_mm, other.seen_axes) == (model.spacing_range_mm, (0, 1))
    assert metadata["sha256"] == digest(path) and metadata["format"] == format
    assert metadata["inputs"]["orientation"] == "RAS" and metadata["inputs"]["dynamic"] == {
        "batch": True,
        "spatial": [True] * 3,
    }
    assert metadata["inputs"]["divisor"] == [2, 2, 2] and ("opset" in metadata) == (format == "onnx")
    assert (
        metadata["training"]["dataset"],
        metadata["training"]["cases"],
        metadata["validation"]["cases"],
    ) == (
        "Tiny",
        4,
        3,
    )
    assert set(metadata["validation"]["dice_per_class"]) == {"box", "hole"}
    assert (
        0 <= metadata["parity"]["largest_difference"] <= 1e-4
        and "case_1.nii.gz" in metadata["parity"]["inputs"]
    )
    words = path.with_name(path.name + ".md").read_text()
    assert (
        metadata["sha256"] in words
        and "Tiny, 4 cases" in words
        and "zscore" in words
        and "1 x 1.5 x 2 mm" in words
    )
    assert (
        str(exported.checkpoint.parent) not in json.dumps(metadata) + words
    )  # no path of the machine that trained it


def test_files_hold_plain_convolutions_alone(exported: Exported) -> None:
    network = inference_load.load(exported.checkpoint, plain=True).network
    wanted = Counter(
        type(layer).__name__
        for layer in network.modules()
        if "Conv" in type(layer).__name__ and not list(layer.children())
    )
    convs, ups = wanted["Conv3d"], wanted["ConvTranspose3d"]
    assert convs == 8 and ups == 1
    graph = torch.jit.load(exported.files["torchscript"]).inlined_graph
    kinds = Counter(
        node.kind().removeprefix("aten::") for node in graph.nodes() if node.kind().startswith("aten::")
    )
    assert (
        set(kinds) == {"_convolution", "instance_norm", "leaky_relu_", "cat"}
        and kinds["_convolution"] == convs + ups
    )
    nodes = torch.export.load(exported.files["pt2"].open("rb")).graph.nodes
    targets = Counter(
        str(node.target)
        for node in nodes
        if node.op == "call_function" and "sym_size" not in str(node.target)
    )
    assert targets["aten.conv3d.default"] == convs and targets["aten.conv_transpose3d.input"] == ups
    assert set(targets) <= {
        *("aten.conv3d.default", "aten.conv_transpose3d.input", "aten.instance_norm.default"),
        *("aten.leaky_relu_.default", "aten.cat.default"),
    }
    onnx = pytest.importorskip("onnx")
    types = Counter(node.op_type for node in onnx.load(exported.files["onnx"]).graph.node)
    assert (
        types["Conv"] == convs
        and types["ConvTranspose"] == ups
        and not {"MatMul", "Einsum", "Gemm"} & set(types)
    )
    before = inference_load.load(exported.checkpoint).network  # with what must not be in a file
    assert (
        type(before.encoder[0][1]).__name__ == "ChannelsLastInstanceNorm3d"
        and fold_convs(network) is not network
    )


def test_predict_takes_an_onnx_file_as_it_takes_a_checkpoint(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, checkpoint, files = exported
    common = ("--input", images, "--device", "cpu", "--save-probabilities", "--mirror-axes", "1")
    assert (
        tiny.call(monkeypatch, "predict", "--checkpoint", checkpoint, *common, "--output", tmp_path / "a")
        == 0
    )
    assert (
        tiny.call(
            monkeypatch, "predict", "--exported-model", files["onnx"], *common, "--output", tmp_path / "b"
        )
        == 0
    )
    for path in sorted((tmp_path / "a").glob("*.nii.gz")):
        labels = [np.asarray(nib.load(tmp_path / side / path.name).dataobj) for side in "ab"]
        chances = [nib.load(tmp_path / side / "probabilities" / path.name).get_fdata() for side in "ab"]
        assert (labels[0] != labels[1]).mean() < 1e-3 and len(np.unique(labels[0])) > 1
        np.testing.assert_allclose(chances[0], chances[1], atol=1e-4)
    record = json.loads((tmp_path / "b/prediction.json").read_text())
    assert record["checkpoint"] == str(files["onnx"]) and record["settings"]["mirror_axes"] == [[1]]


def test_files_and_checkpoints_make_one_mean(exported: Exported, tmp_path: Path) -> None:
    image = exported.images / "case_0.nii.gz"
    several = Predictor.load([exported.checkpoint], models=[exported.files["onnx"]])
    assert len(several.members) == 2 and len(several.preprocessings) == 1
    assert (several(image) != Predictor.load([exported.checkpoint])(image)).mean() < 1e-3


def test_other_metadata_is_another_setting(exported: Exported, tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "m.onnx"
    shutil.copy(exported.files["onnx"], path)
    common = (
        "--input",
        exported.images,
        "--device",
        "cpu",
        "--output",
        tmp_path / "out",
        "--exported-model",
        path,
    )
    exports.sealed(exported.files["onnx"], path)
    assert tiny.call(monkeypatch, "predict", *common) == 0
    metadata = json.loads(metadata_path(path).read_text())
    exports.sealed(exported.files["onnx"], path, inputs={**metadata["inputs"], "spacing_mm": [1.2, 1.5, 2.0]})
    assert "holds results made with other settings" in refusal(monkeypatch, capsys, "predict", *common)


def test_the_command_as_a_user_starts_it(exported: Exported, tmp_path: Path) -> None:
    words = ("--checkpoint", str(exported.checkpoint), "--format", "torchscript", "--output", "m.ts")
    done = tiny.command("export", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "logits differ from the checkpoint's by at most" in done.stdout and "random patches" in done.stdout
    assert "--case IMAGE" in done.stdout and not done.stderr.strip()
    assert {path.name for path in tmp_path.iterdir()} == {"m.ts", "m.ts.json", "m.ts.md"}


def test_the_metadata_says_which_images_are_turned(exported: Exported) -> None:
    """Lone slices and pictures keep their axes; slices of volumes lie in volumes, which are turned."""
    model = inference_load.load(exported.checkpoint)
    for dims, axis, wanted in ((2, None, "as stored"), (2, 2, "RAS"), (3, None, "RAS")):
        preprocessing = PreprocessingConfig(dims, (1.0,) * dims, ("zscore",), ({},), axis)
        inputs = _inputs(
            replace(model, preprocessing=preprocessing),
            SimpleNamespace(divisor=(8,) * dims, dynamic=(True,) * dims),
        )
        assert inputs["orientation"] == wanted and ("anterior" in inputs["layout"]) == (wanted == "RAS")


def test_what_differs_is_not_written(exported: Exported, tmp_path: Path, monkeypatch, capsys) -> None:
    before = {*tmp_path.iterdir()}
    for format, name in (("torchscript", "m.ts"), ("bundle", "folder")):
        words = (
            "--checkpoint",
            exported.checkpoint,
            "--format",
            format,
            "--output",
            tmp_path / name,
            "--tolerance",
            "-1",
        )
        said = refusal(monkeypatch, capsys, "export", *words)
        assert "its logits differ by" in said and "nothing was written" in said
        assert {*tmp_path.iterdir()} == before


def test_bad_input_of_export(exported: Exported, tmp_path: Path, monkeypatch, capsys) -> None:
    branching = exports.variant(
        exported.checkpoint,
        tmp_path / "b.ckpt",
        lambda r: r["config"]["model"].update(_target_="helpers.exports.Branching"),
    )
    good = ("--checkpoint", exported.checkpoint, "--output", tmp_path / "m.ts")
    for words, wanted in (
        ((*good, "--format", "keras"), "--format must be one of torchscript, onnx, pt2, bundle, got keras"),
        (
            (*good, "--format", "onnx", "--opset", "7"),
            f"--opset must lie between {OPSETS[0]} and {OPSETS[-1]}, got 7",
        ),
        (
            ("--checkpoint", tmp_path / "no.ckpt", "--output", tmp_path / "m", "--format", "pt2"),
            "no such checkpoint",
        ),
        (
            ("--checkpoint", exported.checkpoint, "--output", tmp_path / "no/m", "--format", "pt2"),
            "no such folder",
        ),
        (
            (*good, "--format", "bundle", "--output", exported.images),
            "exists already; a bundle needs a new folder",
        ),
        ((*good, "--format", "pt2", "--output", exported.images), "is a folder, expected the name of a file"),
        (
            (*good[:2], "--format", "pt2", "--output", exported.checkpoint),
            "is the checkpoint itself, expected another name",
        ),
        ((*good, "--format", "pt2", "--case", exported.images), "expected one case, found 7"),
        (
            ("--checkpoint", branching, *good[2:], "--format", "pt2", "--trust-package", "helpers"),
            "Branching, cannot be exported",
        ),
    ):
        assert wanted in refusal(monkeypatch, capsys, "export", *words)
    assert {path.name for path in tmp_path.iterdir()} == {"b.ckpt"}


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_missing_packages_have_names(
    exported: Exported, tmp_path: Path, monkeypatch, capsys, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = ("--checkpoint", exported.checkpoint, "--format", "onnx", "--output", tmp_path / "m.onnx")
    assert f"needs {package}: pip install 'medconv[onnx]'" in refusal(monkeypatch, capsys, "export", *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"sha256": "0" * 64}, "the metadata of another file"),
        ({"medconv_metadata": 2}, "metadata of version 2"),
        ({"format": "os.system"}, "its format must be onnx, got 'os.system'"),
        ({"inputs": {}}, "damaged, it cannot be read (KeyError: "),
        ({"windows": []}, "damaged, it cannot be read"),
        ({"outputs": {"class_names": ["a"], "targets": {"names": 3}}}, "damaged, it cannot be read"),
        (None, "its metadata file m.onnx.json is not beside it"),
        ("{", "damaged, or not the metadata of an exported model"),
        ("[]", "damaged, or not the metadata of an exported model"),
    ],
)
def test_metadata_that_does_not_fit(
    exported: Exported, tmp_path: Path, changes, wanted: str, monkeypatch, capsys
) -> None:
    path = Path(shutil.copy(exported.files["onnx"], tmp_path / "m.onnx"))
    if isinstance(changes, str):
        metadata_path(path).write_text(changes)
    elif changes is not None:
        exports.sealed(exported.files["onnx"], path, **changes)
    words = (
        "--exported-model",
        path,
        "--input",
        exported.images,
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
    )
    assert wanted in refusal(monkeypatch, capsys, "predict", *words)


@pytest.mark.parametrize(
    ("format", "name"), [("torchscript", "m.ts"), ("torchscript", "m.pt"), ("pt2", "m.pt2"), ("pt2", "m")]
)
def test_files_of_torch_are_written_but_not_read(
    exported: Exported, tmp_path: Path, format: str, name: str, monkeypatch, capsys
) -> None:
    """With their metadata or without."""
    path = Path(shutil.copy(exported.files[format], tmp_path / name))
    words = (
        "--exported-model",
        path,
        "--input",
        exported.images,
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
    )
    for _ in range(2):
        said = refusal(monkeypatch, capsys, "predict", *words)
        assert f"{path}: a TorchScript or torch.export file; exported models are read as ONNX only" in said
        assert "medconv export --checkpoint CHECKPOINT --format onnx --output m.onnx" in said
        exports.sealed(exported.files[format], path)


def test_other_bad_input_of_predict(exported: Exported, tmp_path: Path, monkeypatch, capsys) -> None:
    words = ("--input", exported.images, "--output", tmp_path / "out", "--device", "cpu")
    assert "--checkpoint or --exported-model is needed" in refusal(monkeypatch, capsys, "predict", *words)
    said = refusal(
        monkeypatch,
        capsys,
        "predict",
        *words,
        "--exported-model",
        exported.files["onnx"],
        "--mirror-axes",
        "2",
    )
    assert "--mirror-axes=[2] needs a network trained on mirrored images" in said
    assert "no such file" in refusal(
        monkeypatch, capsys, "predict", *words, "--exported-model", tmp_path / "no.onnx"
    )


def test_a_mirror_network_and_one_of_batch_norms(tmp_path: Path) -> None:
    """Priors that concern a whole network, and another divisor along each axis."""
    settings = ("conv=mirror", "model.norm=batch", "model.strides=[[2,2,1]]", "data.patch_size=[16,16,12]")
    images, checkpoint = exports.train(tmp_path, *settings)
    export.export(
        checkpoint, tmp_path / "m.onnx", export.ExportOptions("onnx", case=images / "case_0.nii.gz")
    )
    model = load(tmp_path / "m.onnx", mirror_axes=[0, 1])
    assert model.equivariant_axes == (0,) and model.window.mirror_axes == (1,)
    metadata = json.loads(metadata_path(tmp_path / "m.onnx").read_text())
    assert metadata["inputs"]["divisor"] == [2, 2, 1] and isinstance(model.preprocessing, PreprocessingConfig)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "dynunet", "segresnet"])
@pytest.mark.parametrize("format", exports.FORMATS)
def test_networks_of_monai(tmp_path: Path, name: str, format: str) -> None:
    dataset = tiny.write_dataset(tmp_path / "data")
    chosen = [word for word in tiny.SMALL if not word.startswith("model.")]
    from hydra import compose, initialize_config_dir

    from medconv import config
    from medconv.training import run
    from medconv.training.run_dir import RunDir

    words = [
        "data=msd",
        f"data.root={dataset}",
        f"data.cache_dir={tmp_path / 'c'}",
        *chosen,
        f"model={name}",
        "trainer.max_steps=1",
    ]
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        composed = compose("train", [*words, "plan.max_stages=2", f"run.dir={tmp_path / 'run'}"])
    checked = config.validate(composed)
    run.train(checked, RunDir.of(checked, {}))
    case = dataset / "imagesTr/case_0.nii.gz"
    export.export(
        tmp_path / "run/checkpoints/last.ckpt", tmp_path / "m", export.ExportOptions(format, case=case)
    )
    assert exports.read_back(tmp_path / "m", format).network is not None
