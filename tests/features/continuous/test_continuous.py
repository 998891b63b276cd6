"""medconv/features/continuous: targets that are images, from their files to predictions in their units."""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import small_runs, tiny
from skimage.metrics import structural_similarity

from medconv.data.per_case import with_missing_channels
from medconv.data.preprocessing.examine import examine
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_case
from medconv.features.continuous import labels, metrics
from medconv.features.continuous.evaluation import evaluate
from medconv.features.continuous.layout import image_pairs
from medconv.features.continuous.losses import ImageLoss
from medconv.features.continuous.targets import ContinuousTargets
from medconv.inference.predictor import Predictor
from medconv.targets import Targets
from medconv.training.losses.fit import FittedLoss
from medconv.utils.errors import ArgumentError
from medconv.utils.exit_codes import DONE, USER

AFFINE = np.diag([1.0, 1.5, 2.0, 1.0])
SAME = ["data.labels=clean", "data.layout.same_units=true", "optimizer=adamw", "callbacks=default"]


def save(path, array, affine=AFFINE):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.asarray(array, np.float32), affine), path)
    return path


def write_pairs(root, cases=6):
    """Noisy images and clean ones, of scales from 1 to 1000; and `dose`, clean ones in a unit of their own."""
    for number in range(cases):
        rng = np.random.default_rng(number)
        x, y, z = np.indices((16, 18, 12))
        clean = 2 + np.sin(x / 3 + number) + np.cos(y / 4) * np.sin(z / 3)
        noisy = clean + rng.normal(0, 0.5, clean.shape)
        scale = 10.0 ** (number % 4)
        # every other file has its first axis the other way round
        affine = AFFINE * np.array([-1.0 if number % 2 else 1.0, 1, 1, 1])
        save(root / f"noisy/case{number}.nii.gz", scale * noisy, affine)
        save(root / f"clean/case{number}.nii.gz", scale * clean, affine)
        save(root / f"dose/case{number}.nii.gz", 40 + 5 * clean, affine)
    return root


def train(root, folder, *more):
    """One run in this process; returns its summary."""
    return tiny.trained(*overrides(root, folder), *more)


def overrides(root, folder):
    return [
        "data=image_pairs",
        f"data.root={root}",
        "data.images=noisy",
        f"data.cache_dir={root.parent / 'prepared'}",
        *tiny.SMALL,
        f"run.dir={folder}",
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "data")


@pytest.fixture(scope="module")
def denoised(pairs):
    """A run of four steps that learns the difference to the noisy image."""
    folder = pairs.parent / "run"
    train(pairs, folder, *SAME, "callbacks=default")
    return folder


def test_metrics_are_those_of_scikit_image_however_many_planes_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    reference = rng.random((24, 21, 15))
    image = reference + 0.1 * rng.standard_normal(reference.shape)
    extent = float(np.ptp(reference))
    row = metrics.measure(image, reference)
    theirs = structural_similarity(
        image, reference, data_range=extent, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
    )
    assert row["ssim"] == pytest.approx(theirs, abs=1e-5)
    assert row["psnr"] == pytest.approx(10 * np.log10(extent**2 / np.square(image - reference).mean()))
    assert row["mae"] == pytest.approx(np.abs(image - reference).mean())
    # within a network's half precision, too
    with torch.autocast("cpu", torch.bfloat16):
        assert metrics.measure(image, reference) == row
    monkeypatch.setattr(metrics, "_VOXELS_AT_ONCE", 500)
    assert metrics.measure(image, reference)["ssim"] == pytest.approx(row["ssim"])
    # PSNR and SSIM do not depend on units, even far from 0
    scaled = metrics.measure(1e4 + 100 * image, 1e4 + 100 * reference)
    assert scaled["ssim"] == pytest.approx(row["ssim"], abs=1e-5)
    assert scaled["psnr"] == pytest.approx(row["psnr"])


def test_metrics_of_pictures_and_of_constant_references():
    rng = np.random.default_rng(0)
    picture = rng.random((20, 30, 1))
    assert metrics.measure(picture, picture) == {
        "psnr": pytest.approx(140),
        "ssim": pytest.approx(1),
        "mae": 0,
    }
    # the product of two negative factors is positive, but the images are opposites
    assert metrics.measure(-picture, picture)["ssim"] < -0.9
    assert metrics.measure(picture, np.ones_like(picture))["psnr"] is None
    assert metrics.means([metrics.measure(picture, np.ones_like(picture))])["ssim"] is None


@pytest.mark.parametrize("same_units", [False, True])
def test_targets_take_their_losses_and_come_back_from_plain_values(same_units):
    targets = ContinuousTargets(same_units=same_units, mean=-300.0, std=500.0, low=-1000.0)
    assert Targets.from_plain(json.loads(json.dumps(targets.plain()))) == targets
    for loss in (ImageLoss(), ImageLoss(ssim=0.5), torch.nn.MSELoss()):
        FittedLoss(loss, targets, spatial_dims=3)
    with pytest.raises(ValueError, match="CrossEntropyLoss is for label_map .*use loss=image_l1"):
        FittedLoss(torch.nn.CrossEntropyLoss(), targets, spatial_dims=2)
    with pytest.raises(ValueError, match="continuous targets need"):
        Targets.from_plain({**targets.plain(), "std": 0})


def test_the_loss_is_that_of_the_images_in_both_units():
    target = torch.rand(2, 1, 12, 12)
    image = torch.rand(2, 1, 12, 12)
    of_difference = ContinuousTargets(same_units=True)
    outputs = target - image
    encoded = of_difference.encode(torch.cat([target, image], 1))
    assert float(of_difference.compare(ImageLoss(ssim=0.5), outputs, encoded)) == pytest.approx(0, abs=1e-5)
    own = ContinuousTargets(mean=10.0, std=2.0)
    loss = own.compare(ImageLoss(), torch.zeros(2, 1, 12, 12), own.encode(12 * torch.ones(2, 1, 12, 12)))
    assert float(loss) == pytest.approx(1)


def test_what_pads_a_patch_has_the_lowest_value_of_the_targets(pairs):
    dataset = image_pairs("noisy", "dose", root=str(pairs))
    case, targets = dataset.cases[0], dataset.targets
    config = PreprocessingConfig(3, (1.0, 1.5, 2.0), ("zscore",), ({},))
    stored = preprocess_case(case, config, 2, targets).training_label
    dose = nib.load(case.label).get_fdata()
    assert stored.min() == pytest.approx(dose.min() - targets.low, abs=1e-4)
    padded = torch.nn.functional.pad(torch.from_numpy(stored)[None], (0, 4))
    in_units = targets.encode(padded) * targets.std + targets.mean
    assert in_units[..., :-4].numpy() == pytest.approx(dose[None, None], abs=1e-3)
    assert torch.allclose(in_units[..., -4:], torch.tensor(targets.low))


def test_mean_spread_and_lowest_value_are_those_of_all_voxels_of_the_targets(tmp_path):
    """Not means over images: here the voxels of two images lie apart, and those of each are alike."""
    images = [np.full((4, 4, 4), 10.0), np.full((4, 4, 4), 30.0)]
    images[0][0, 0, 0] = 8
    for name, image in zip("ab", images, strict=True):
        save(tmp_path / f"images/{name}.nii.gz", image)
        save(tmp_path / f"targets/{name}.nii.gz", image)
    targets = image_pairs("images", "targets", root=str(tmp_path)).targets
    expected = (np.mean(images), np.std(images), np.min(images))
    assert (targets.mean, targets.std, targets.low) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("same_units", [False, True])
def test_patches_are_centred_where_the_image_is_bright_and_not_the_target(same_units, tmp_path):
    """Bright in the first half, the target in the second one."""
    image, target = np.full((8, 6, 4), 1.0), np.full((8, 6, 4), 1.0)
    image[:4], target[4:] = 5, 9
    save(tmp_path / "images/a.nii.gz", image)
    save(tmp_path / "targets/a.nii.gz", target)
    dataset = image_pairs("images", "targets", same_units, root=str(tmp_path))
    spacing_mm = tuple(np.abs(np.diag(AFFINE))[:3])
    config = PreprocessingConfig(3, spacing_mm, ("zscore",), ({},))
    prepared = preprocess_case(dataset.cases[0], config, 2, dataset.targets)
    np.testing.assert_array_equal(prepared.label.squeeze(), image == 5)


def test_a_constant_added_to_both_images_changes_no_ssim():
    rng = torch.Generator().manual_seed(0)
    outputs, target = (torch.rand(2, 1, 12, 12, generator=rng) for _ in range(2))
    loss = ImageLoss(ssim=1.0)
    assert float(loss(outputs - 3, target - 3)) == pytest.approx(float(loss(outputs, target)), abs=1e-4)


def test_prepared_targets_are_those_of_one_lowest_value():
    """They are stored less that value, unless they are differences to the image."""
    for same_units in (False, True):
        settings = [labels.settings(ContinuousTargets(same_units=same_units, low=low)) for low in (1.0, 2.0)]
        assert (settings[0] == settings[1]) == same_units


def wrong_pair(tmp_path, image, target, same, affine):
    save(tmp_path / "images/a.nii.gz", image)
    save(tmp_path / "targets/a.nii.gz", target, affine)
    dataset = image_pairs(str(tmp_path / "images"), str(tmp_path / "targets"), same)
    return examine(dataset.cases[0], dataset)


RAMP = np.arange(16 * 18 * 12.0).reshape(16, 18, 12)
WRONG = {
    "grid": (RAMP, RAMP, True, np.diag([2.0, 1.5, 2.0, 1.0]), "its affine puts the volume's corners"),
    "shape": (RAMP, RAMP[:8], True, AFFINE, "shape (8, 18, 12) differs from that of"),
    "nan": (RAMP, np.where(RAMP == 7, np.nan, RAMP), True, AFFINE, "1 voxels are NaN or infinite"),
    "channels": (RAMP, np.stack([RAMP, RAMP], -1), True, AFFINE, "expected an image of one channel, found 2"),
    "constant": (RAMP, np.full_like(RAMP, 3), True, AFFINE, "every voxel of the target is 3"),
    "equal": (RAMP, RAMP, True, AFFINE, "the target equals the image"),
    "units": (RAMP, 100 * RAMP, True, AFFINE, "the target varies 100 times as much as the image"),
    "alike": (RAMP, RAMP + 1, False, AFFINE, "set data.layout.same_units=true"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_looks_wrong_in_a_pair(name, tmp_path):
    *pair, text = WRONG[name]
    report = wrong_pair(tmp_path, *pair)
    (message,) = report.errors or report.warnings
    assert text in message
    assert "targets/a.nii.gz" in message
    assert bool(report.errors) == (name in ("grid", "shape", "nan", "channels"))


def test_a_difference_needs_the_first_channel(tmp_path):
    for file in ("first/b", "second/a", "second/b", "target/a", "target/b"):
        save(tmp_path / f"{file}.nii.gz", RAMP)
    images = {name: f"{tmp_path}/{name}/{{id}}.nii.gz" for name in ("first", "second")}
    for same_units in (True, False):
        dataset = image_pairs(images, str(tmp_path / "target/{id}.nii.gz"), same_units)
        errors = examine(dataset.cases[0], with_missing_channels(dataset)).errors
        assert ["its first channel is missing" in error for error in errors] == [True] * same_units


def test_the_layout_names_what_is_missing(pairs):
    with pytest.raises(ArgumentError, match="labels is not set"):
        image_pairs(str(pairs / "noisy"), "")
    with pytest.raises(
        ArgumentError,
        match="no case has both an image and a label; ids are case0, .* in images, n0 in labels",
    ):
        save(pairs.parent / "others/n0.nii.gz", RAMP)
        image_pairs(str(pairs / "noisy"), str(pairs.parent / "others"))
    dataset = image_pairs("noisy", "clean/{id}.nii.gz", True, root=str(pairs))
    assert not dataset.errors
    save(pairs.parent / "few/case1.nii.gz", RAMP)
    lacking = image_pairs(str(pairs / "noisy"), str(pairs.parent / "few"), True)
    assert "no label matches" in lacking.errors["case0"]


def test_a_run_learns_scores_shows_and_goes_on(pairs, denoised, tmp_path):
    summary = json.loads((denoised / "summary.json").read_text())
    assert summary["score"]["name"] == "val/psnr"
    assert len(summary["val/cases"]) == 2
    assert {"val/psnr", "val/ssim", "val/mae"} <= set(summary)
    tags = small_runs.image_tags(denoised)
    assert any("(image, target)" in tag for tag in tags)
    assert any("(image, prediction, reference, error)" in tag for tag in tags)
    last = denoised / "checkpoints/last.ckpt"
    more = [*SAME, "trainer.max_steps=6", f"run.resume={last}"]
    assert train(pairs, tmp_path / "on", *more)["steps"] == 6


def test_predictions_have_the_grid_and_the_scale_of_their_image(
    pairs, denoised, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "predictions"
    words = ["--checkpoint", denoised, "--input", pairs / "noisy", "--output", output]
    assert tiny.call(monkeypatch, "predict", *words) == DONE
    for number in (2, 3):
        image = nib.load(pairs / f"noisy/case{number}.nii.gz")
        predicted = nib.load(output / f"case{number}.nii.gz")
        np.testing.assert_allclose(predicted.affine, image.affine)
        assert predicted.shape == image.shape
        assert predicted.get_data_dtype() == np.float32
        # a few steps change little of the image, in its own units
        ratio = predicted.get_fdata().std() / image.get_fdata().std()
        assert 0.2 < ratio < 5
    # an array is answered alike
    predictor = Predictor.load(denoised)
    np.testing.assert_allclose(
        predictor(pairs / "noisy/case3.nii.gz"), predicted.get_fdata(), rtol=1e-4, atol=1e-2
    )
    # metrics of a validation case are those of the run
    scores = tmp_path / "metrics.json"
    words = ["--predictions", output, "--references", pairs / "clean", "--output", scores]
    assert tiny.call(monkeypatch, "evaluate", *words, "--compare", pairs / "noisy") == DONE
    result = json.loads(scores.read_text())
    validated = json.loads((denoised / "summary.json").read_text())["val/cases"]
    for row in result["cases"]:
        if row["case"] in validated:
            assert row["psnr"] == pytest.approx(validated[row["case"]]["psnr"], abs=1e-2)
    assert result["comparison"]["psnr"]["n"] == 6
    assert len(scores.with_suffix(".csv").read_text().splitlines()) == 1 + 2 * 6
    assert "PSNR (dB)" in capsys.readouterr().out
    assert "structural similarity" in scores.with_suffix(".html").read_text()
    # what is for label maps alone is refused, in one line
    assert tiny.call(monkeypatch, "evaluate", *words, "--lesions") == USER
    assert "--lesions is for label maps of classes" in capsys.readouterr().err
    words = ["--checkpoint", denoised, "--input", pairs / "noisy", "--output", tmp_path / "other"]
    assert tiny.call(monkeypatch, "predict", *words, "--save-probabilities") == USER
    assert "--save-probabilities is for label maps of classes" in capsys.readouterr().err
    assert tiny.call(monkeypatch, "predict", *words, "--saliency") == USER
    assert "best.ckpt predicts continuous" in capsys.readouterr().err


def test_an_exported_network_has_the_same_outputs(pairs, denoised, tmp_path, monkeypatch):
    model = tmp_path / "model.pt2"
    words = [
        "--checkpoint",
        denoised,
        "--output",
        model,
        "--format",
        "pt2",
        "--case",
        pairs / "noisy/case0.nii.gz",
    ]
    assert tiny.call(monkeypatch, "export", *words) == DONE
    described = json.loads((tmp_path / "model.pt2.json").read_text())
    assert described["parity"]["largest_difference"] < 1e-4
    assert described["outputs"]["targets"]["same_units"] is True


def test_another_quantity_has_its_own_units(pairs, tmp_path):
    summary = train(pairs, tmp_path / "run", "data.labels=dose", "trainer.max_steps=2")
    # a network that has hardly learned answers near the mean, 50, of values from 40 to 60
    assert summary["val/mae"] < 15
    predicted = Predictor.load(tmp_path / "run")(pairs / "noisy/case3.nii.gz")
    assert 30 < predicted.mean() < 70


@pytest.mark.parametrize(
    ("name", "words"), [("light", "p.noise=1"), ("monai", "transforms: RandScaleIntensityd")]
)
def test_an_augmentation_of_the_image_alone_is_refused(pairs, tmp_path, name, words):
    same_units = ["data.labels=clean", "data.layout.same_units=true"]
    with pytest.raises(ValueError, match=f"augmentation.{words} changes the image alone"):
        train(pairs, tmp_path / "run", *same_units, f"augmentation={name}")


def test_what_cannot_be_measured_is_named(pairs, tmp_path):
    shutil.copytree(pairs / "clean", tmp_path / "predicted")
    save(tmp_path / "predicted/case0.nii.gz", np.full((16, 18, 12), np.nan))
    save(tmp_path / "predicted/case1.nii.gz", RAMP[:8])
    with pytest.raises(ValueError, match="2 of 6 cases cannot be evaluated") as error:
        evaluate(tmp_path / "predicted", pairs / "clean")
    assert "case0.nii.gz: 3456 voxels are NaN or infinite, expected finite numbers" in str(error.value)
    assert "case1.nii.gz: shape (8, 18, 12) differs from that of" in str(error.value)


def test_a_run_on_all_cases_has_no_scores():
    scores = ContinuousTargets().scores
    assert scores.table({}) == []
    assert scores.table({"val/psnr": None})[0] == ("PSNR (dB)", None)
