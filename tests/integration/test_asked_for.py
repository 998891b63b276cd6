"""README's table "asked for elsewhere, here" on six real hippocampi: short runs, whose scores say nothing."""

import json

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.rated import add_rater
from helpers.two_contrasts import save

import medconv
from medconv.features.export.export import export
from medconv.features.export.job import ExportOptions
from medconv.features.pretrained.rescale import kernel_sizes
from medconv.inference.load import load

CASES = 6
PLAN = ["data.patch_size=[32,32,32]", "conv=none"]


@pytest.fixture(scope="module")
def hippocampi(realdata, tmp_path_factory):
    """Six cases in the layout of the Decathlon; label maps are copies, which a test may change."""
    source = realdata / "Task04_Hippocampus"
    root = tmp_path_factory.mktemp("hippocampi") / "data"
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    meta = json.loads((source / "dataset.json").read_text())
    meta["training"] = meta["training"][:CASES]
    for entry in meta["training"]:
        (root / entry["image"]).symlink_to(source / entry["image"])
        (root / entry["label"]).write_bytes((source / entry["label"]).read_bytes())
    (root / "dataset.json").write_text(json.dumps(meta))
    return root


@pytest.fixture(scope="module")
def trained(hippocampi):
    """The checkpoint of a network that nnU-Net can have, too."""
    folder = hippocampi.parent / "trained"
    tiny.train(hippocampi, folder, *PLAN, "model.strided=true", "model.norm=instance")
    return folder / "checkpoints/best.ckpt"


def image_of(root):
    return min((root / "imagesTr").iterdir())


@pytest.mark.slow
def test_a_network_of_nnunet_is_given_back_and_trained_on_with_other_classes(
    hippocampi, trained, tmp_path, caplog
):
    """Its encoder and decoder compute the same at first, with kernels of the size of random ones."""
    export(trained, tmp_path / "Dataset004_Hip", ExportOptions("nnunet", case=image_of(hippocampi)))
    (model,) = (tmp_path / "Dataset004_Hip").glob("nnUNetTrainer*")
    other_classes = ["data.regions={both:[1,2]}", "optimizer.lr=0", "weight_averaging=none"]
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(hippocampi, tmp_path / "run", *other_classes, f"init.pretrained={model}")
    assert "2 randomly initialised (head.weight, head.bias)" in caplog.text
    source = load(trained, plain=True).network
    tuned = load(tmp_path / "run/checkpoints/best.ckpt", plain=True).network
    before = kernel_sizes(source)
    assert before.keys() == kernel_sizes(tuned).keys()
    for network in (source, tuned):
        network.head = torch.nn.Identity()
    image = nib.load(image_of(hippocampi))
    voxels = torch.from_numpy(image.get_fdata(dtype=np.float32))[None, None, :32, :32, :32]
    voxels = (voxels - voxels.mean()) / voxels.std()
    with torch.no_grad():
        torch.testing.assert_close(tuned(voxels), source(voxels), rtol=1e-3, atol=1e-3)


def test_several_raters(hippocampi, tmp_path):
    add_rater(hippocampi, cases=CASES - 1)
    summary = tiny.train(hippocampi, tmp_path / "run", *PLAN, "data.raters=[labelsTr2]")
    assert len(summary["val/rater_dice"]) == 2 and 0 <= summary["val/brier"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cldice", "skeleton_recall", "boundary"])
def test_losses_for_thin_structures(hippocampi, tmp_path, loss):
    tiny.train(hippocampi, tmp_path / "run", *PLAN, f"loss={loss}", "trainer.max_steps=2")
    assert np.isfinite(tiny.losses(tmp_path / "run")).all()


def test_cldice_as_a_metric(hippocampi, tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    labels = hippocampi / "labelsTr"
    words = ("--predictions", labels, "--references", labels, "--centreline")
    assert tiny.call(monkeypatch, "evaluate", *words, "--output", tmp_path / "metrics.json") == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["mean"]["cldice"] == 1


def test_a_missing_channel(hippocampi, tmp_path):
    """The second channel is the first one with other intensities; two cases lack it."""
    root = tmp_path / "data"
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    meta = json.loads((hippocampi / "dataset.json").read_text())
    for index, entry in enumerate(meta["training"]):
        image = nib.load(hippocampi / entry["image"])
        label = nib.load(hippocampi / entry["label"])
        voxels = image.get_fdata(dtype=np.float32)
        save(root / f"imagesTr/case_{index}_0000.nii.gz", voxels)
        if index not in (1, 4):
            save(root / f"imagesTr/case_{index}_0001.nii.gz", -voxels)
        save(root / f"labelsTr/case_{index}.nii.gz", np.asarray(label.dataobj).astype(np.uint8))
    labels = {name: int(value) for value, name in meta["labels"].items()}
    content = {"channel_names": {"0": "T1", "1": "inverted"}, "labels": labels, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps({**content, "numTraining": CASES}))
    summary = tiny.train(root, tmp_path / "run", *PLAN, "data=nnunet", "data.missing=allow")
    assert not summary["skipped_cases"]
    predictor = medconv.load(tmp_path / "run/checkpoints/best.ckpt")
    assert predictor(root / "imagesTr/case_1_0000.nii.gz", None).any()


def test_quality_from_one_network(hippocampi, trained, tmp_path, monkeypatch):
    words = ("--checkpoint", trained, "--input", image_of(hippocampi), "--output", tmp_path, "--quality")
    assert tiny.call(monkeypatch, "predict", *words) == 0
    (path,) = (tmp_path / "quality").glob("*.json")
    assert json.loads(path.read_text())["networks"] == 1


def test_the_encoder_of_a_segmentation_classifies_whole_images(hippocampi, trained, tmp_path, caplog):
    """Whether the hippocampus is large, of the prepared size that the segmentation had."""
    volumes = {}
    for path in sorted((hippocampi / "labelsTr").iterdir()):
        label = nib.load(path)
        volumes[path.name] = int(np.count_nonzero(np.asarray(label.dataobj)))
    middle = sorted(volumes.values())[CASES // 2]
    rows = [f"{hippocampi / 'imagesTr' / name},{size >= middle}" for name, size in volumes.items()]
    table = tmp_path / "sizes.csv"
    table.write_text("path,label\n" + "\n".join(rows) + "\n")
    encoder = ["model=encoder", "model.channels=[4,8]", "model.strides=[2]", "model.kernel_size=3"]
    with caplog.at_level("INFO", logger="medconv"):
        tiny.train(
            tmp_path,
            tmp_path / "run",
            "data=csv",
            f"data.root={table}",
            "data.patch_size=[32,32,32]",
            *encoder,
            "model.strided=true",
            "model.norm=instance",
            "conv=none",
            f"init.pretrained={trained}",
        )
    assert "2 randomly initialised (head.weight, head.bias)" in caplog.text
