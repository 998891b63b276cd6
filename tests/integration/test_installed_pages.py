"""Every code block of README.md and of docs/*.md as an installed user copies it: by bash, and `medconv` from the
wheel, in a folder of one's own. The data are small, and trainings end after two steps; all else is as written. A
block that does not run has a comment above it that says why.
"""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
from helpers import dicoms, image_level_tables, pages, tiny, wheel
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # README alone has some fifteen trainings

BEGIN = """
set -eu -o pipefail
medconv() {
    case $1 in
        train | sweep | ensemble)
            command medconv "$@" trainer.max_time=null trainer.max_steps=2 trainer.enable_progress_bar=false ;;
        *) command medconv "$@" ;;
    esac
}
"""
SHORTER = (  # in Python
    ('time = "00:00:06:00"', 'time = "00:00:00:10"'),
    ("trainer__max_steps=1000", "trainer__max_steps=2"),
    ("Trainer(max_epochs=2", "Trainer(max_epochs=1, limit_train_batches=2"),
)
PAGES = [
    page
    for page in (*pages.FIRST_HOUR, *pages.OTHER)
    if pages.runnable(page, "bash") or pages.runnable(page, "python")
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The wheel in `site`, and what the pages name: `data`, and `runs` that were trained before."""
    path = tmp_path_factory.mktemp("installed")
    wheel.install(path)
    pages.write_data(path)
    write_two_channels(path / "two")
    write_findings(path / "xray")
    images = "'data.images={t1:{id}/t1.nii.gz,flair:{id}/flair.nii.gz}' 'data.labels={id}/seg.nii.gz'"
    runs = (
        f"data=msd data.root={path}/data/Task04_Hippocampus run.name=NAME",
        f"data=folder data.root={path}/two {images} run.name=a",
        f"data=folder data.root={path}/two {images} run.name=b seed=1",
        f"data=csv data.root={path}/xray/labels.csv run.name=xray",
    )
    finish(
        wheel.start(
            path / "site", path, "bash", "-c", BEGIN + "\n".join(f"medconv train {run}" for run in runs)
        )
    )
    return path


def finish(done):
    assert done.returncode == 0, done.stdout[-5000:]


def write_two_channels(folder):
    """CASE/t1.nii.gz, flair.nii.gz and seg.nii.gz, and a case's channels as files beside them."""
    dataset = tiny.write_dataset(folder.parent / "single", cases=5)
    for number in range(5):
        case = folder / f"p{number}"
        case.mkdir(parents=True)
        for channel in ("t1", "flair"):
            shutil.copy(dataset / f"imagesTr/case_{number}.nii.gz", case / f"{channel}.nii.gz")
        shutil.copy(dataset / f"labelsTr/case_{number}.nii.gz", case / "seg.nii.gz")


def write_findings(folder):
    """labels.csv with a class, two findings, an age and a patient of each picture."""
    folder.mkdir()
    rows = []
    for number in range(12):
        positive = number % 2
        pixels = np.random.default_rng(number).normal(60 + 100 * positive, 15, (32, 32))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        label = "sick" if positive else "healthy"
        rows.append([f"{number}.png", label, positive, number // 2 % 2, 40 + number, f"patient{number // 2}"])
    columns = ["path", "label", "edema", "nodule", "age", "patient"]
    image_level_tables.write_table(folder / "labels.csv", columns, *rows)


def write_classes(folder, table):
    """CLASS/*.png of the pictures of such a table."""
    for number in range(12):
        target = folder / ("sick" if number % 2 else "healthy") / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(table.parent / f"{number}.png", target)


def write_medmnist(path):
    arrays = {}
    for split in ("train", "val", "test"):
        labels = np.arange(8) % 2
        noise = np.random.default_rng(len(split)).normal(0, 15, (8, 28, 28))
        arrays[f"{split}_images"] = (60 + 100 * labels[:, None, None] + noise).clip(0, 255).astype(np.uint8)
        arrays[f"{split}_labels"] = labels[:, None].astype(np.uint8)
    np.savez(path, **arrays)


def write_photographs(folder):
    """As DRIVE: a/N_training.tif, b/N_manual1.gif of 0 and 255; pred/N.png of 0 and 1."""
    for name in ("a", "b", "pred"):
        (folder / name).mkdir()
    for number in range(21, 26):
        pixels = np.random.default_rng(number).integers(0, 100, (64, 64, 3)).astype(np.uint8)
        vessel = np.zeros((64, 64), np.uint8)
        vessel[20:30] = 1
        pixels[vessel > 0] += 100
        Image.fromarray(pixels).save(folder / f"a/{number}_training.tif")
        Image.fromarray(255 * vessel).save(folder / f"b/{number}_manual1.gif")
        Image.fromarray(vessel).save(folder / f"pred/{number}.png")


def write_series(folder):
    """A DICOM series of each patient, pN/3-T1post-0042, and its label map, masks/pN.nii.gz."""
    (folder / "masks").mkdir()
    for number in range(5):
        label = np.zeros((16, 18, 12), np.uint8)
        label[4:10, 5:12, 3:8] = 1
        voxels = (dicoms.array(label.shape, number) % 100 + 200 * label).astype(np.int16)
        dicoms.series(folder / f"p{number}/3-T1post-0042", voxels)
        nib.save(nib.Nifti1Image(label, dicoms.affine()), folder / f"masks/p{number}.nii.gz")


def write_raters(decathlon, home, folder):
    """Two further raters beside the data; i/CASE.nii.gz, and p/CASE.nii.gz with the probability of a lesion."""
    lesions = home / "data/lesions"
    shutil.copytree(decathlon, lesions)
    for rater in ("labelsTr2", "labelsTr3"):
        shutil.copytree(decathlon / "labelsTr", lesions / rater)
    shutil.copytree(decathlon / "imagesTr", folder / "i")
    (folder / "p").mkdir()
    for path in (decathlon / "labelsTr").iterdir():
        label = nib.load(path)
        probability = 0.75 * (np.asarray(label.dataobj) == 1).astype(np.float32)
        nib.save(nib.Nifti1Image(probability, label.affine), folder / "p" / path.name)


def prepare(page, folder, home):
    """What a page takes for given in the folder in which its commands run."""
    decathlon = home / "data/Task04_Hippocampus"
    if page in pages.FIRST_HOUR:
        return
    (folder / "runs").symlink_to(home / "runs")
    for name, source in (("images", "imagesTr"), ("labels", "labelsTr"), ("labelsTr", "labelsTr")):
        shutil.copytree(decathlon / source, folder / name)
    shutil.copytree(decathlon / "imagesTr", folder / "known")
    shutil.copytree(decathlon / "imagesTr", folder / "new")
    shutil.copy(decathlon / "imagesTr/case_0.nii.gz", folder / "image.nii.gz")
    if page == "docs/inference.md":
        for file in (home / "xray").iterdir():
            shutil.copy(file, folder)
        for channel in ("t1", "flair"):
            shutil.copy(home / f"two/p0/{channel}.nii.gz", folder / f"case_{channel}.nii.gz")
    if page == "docs/evaluation.md":
        for name in ("predictions", "a", "b"):
            shutil.copytree(decathlon / "labelsTr", folder / name)
        meta = json.loads((decathlon / "dataset.json").read_text())
        meta["labels"] = {"0": "background", "1": "vessel", "2": "organ"}
        (folder / "dataset.json").write_text(json.dumps(meta))
        columns = ["path", "label", "split"]
        rows = [[f"{number}.png", ("cat", "dog")[number % 2], "test"] for number in range(12)]
        image_level_tables.write_table(folder / "labels.csv", columns, *rows)
        outputs = [[str(number), "cat", 0.9 - 0.05 * number, 0.1 + 0.05 * number] for number in range(12)]
        image_level_tables.write_table(
            folder / "predictions/predictions.csv", ["case", "predicted", "cat", "dog"], *outputs
        )
    if page == "docs/targets.md":
        write_raters(decathlon, home, folder)
    if page == "docs/data.md":
        for file in (home / "xray").iterdir():
            shutil.copy(file, folder)
        write_classes(folder / "xray", home / "xray/labels.csv")
        write_medmnist(folder / "pneumoniamnist.npz")
        write_photographs(folder)
        write_series(folder)
        shutil.copytree(home / "two", folder, dirs_exist_ok=True)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_as_an_installed_user_copies_them(home, tmp_path, page):
    prepare(page, tmp_path, home)
    python = "\n".join(pages.runnable(page, "python"))
    for written, shorter in SHORTER:
        python = python.replace(written, shorter)
    (tmp_path / "blocks.py").write_text(pages.with_tiny_data(python, home))
    text = "\n".join(pages.runnable(page, "bash"))
    script = (
        BEGIN
        + "set -x\n"
        + pages.with_tiny_data(text, home)
        + "\ncd "
        + str(tmp_path)
        + "\npython blocks.py\n"
    )
    finish(wheel.start(home / "site", tmp_path, "bash", "-c", script))
