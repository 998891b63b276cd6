"""Label maps and probabilities of one network or several, and inputs that do not fit."""

from dataclasses import replace
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import loaded_models, members
from helpers.restoring import restore
from torch import nn

from medconv.data.case import Case
from medconv.data.io.images import read_image
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_image
from medconv.inference.predictor import Predictor, check_same


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return members.train(tmp_path_factory.mktemp("predictor"))


@pytest.fixture(scope="module")
def image(trained, tmp_path_factory):
    """Its spacing and orientation differ from the prepared grid; zeros surround the content."""
    array = nib.load(trained[0] / "case_1.nii.gz").get_fdata().astype(np.float32)
    affine = np.array([[0, -1.2, 0, 3], [1.4, 0, 0, 4], [0, 0, 1.7, 5], [0, 0, 0, 1]])
    path = tmp_path_factory.mktemp("image") / "image.nii.gz"
    nib.save(nib.Nifti1Image(np.pad(array, ((1, 2), (0, 3), (2, 0))), affine), path)
    return path


def test_training_cases_are_those_of_any_network():
    seen = (frozenset({"a"}), frozenset(), frozenset({"a", "b"}))
    models = [loaded_models.segmentation(nn.Conv3d(1, 2, 1), train_cases=cases) for cases in seen]
    assert Predictor(models).train_cases == {"a", "b"}


def logits_of(predictor, image):
    """The logits of each member alone."""
    logits = []
    for member in predictor.members:
        array, _ = preprocess_image(*read_image([image]), member.preprocessing)
        with torch.inference_mode():
            logits.append(member.window(member.network, torch.from_numpy(array)[None])[0])
    return logits


def scores_of(predictor, image):
    return predictor.scores([predictor.read(Case("x", (image,)))], keeps_logits=True)[0]


def probabilities_of(predictor, image):
    """(channels, X, Y, Z)."""
    return np.stack(list(scores_of(predictor, image).probabilities()))


def label_of_regions(probabilities):
    label = np.zeros(probabilities.shape[1:], np.int16)
    for value, region in zip((1, 2, 3), probabilities, strict=True):
        label[region > 0.5] = value
    return label


def test_one_member_gives_the_label_map_of_validation(trained, image):
    predictor = Predictor.load([trained[1]])
    (logits,) = logits_of(predictor, image)
    crop = predictor.read(Case("x", (image,))).crops[0]
    label = predictor(image)
    assert label.shape == nib.load(image).shape and label.dtype == np.int16 and len(np.unique(label)) > 1
    np.testing.assert_array_equal(label, restore(logits, crop, predictor.targets.decode))


@pytest.mark.parametrize("edit", [None, members.regions])
def test_the_label_map_follows_from_the_probabilities(trained, image, tmp_path, edit):
    predictor = Predictor.load([members.variant(trained[1], tmp_path / "a.ckpt", edit)])
    label, probabilities = predictor(image), probabilities_of(predictor, image)
    assert probabilities.shape == (3, *label.shape) and probabilities.dtype == np.float32
    assert probabilities.min() >= 0 and probabilities.max() <= 1
    if edit is None:
        np.testing.assert_allclose(probabilities.sum(0), 1, rtol=1e-5)
        np.testing.assert_array_equal(probabilities.argmax(0), label)
    else:
        np.testing.assert_array_equal(label_of_regions(probabilities), label)
        assert not np.allclose(probabilities.sum(0), 1)
    outside = np.ones(label.shape, bool)
    outside[1:-2, : label.shape[1] - 3, 2:] = False
    assert (label[outside] == 0).all()
    expected = np.tile([[edit is None], [0], [0]], (1, outside.sum()))
    np.testing.assert_array_equal(probabilities[:, outside], expected)


def test_members_with_equal_preprocessing_give_the_mean_of_their_logits(trained, image, tmp_path):
    other = members.variant(trained[1], tmp_path / "b.ckpt")
    predictor = Predictor.load([trained[1], other])
    scores = scores_of(predictor, image)
    a, b = logits_of(predictor, image)
    assert len(scores.logits) == 1
    torch.testing.assert_close(scores.logits[0], (a + b) / 2)
    np.testing.assert_array_equal(
        predictor(image), restore((a + b) / 2, scores.crop, predictor.targets.decode)
    )
    assert any((predictor(image) != Predictor.load([path])(image)).any() for path in (trained[1], other))


@pytest.mark.parametrize("edit", [None, members.regions])
def test_members_with_different_preprocessing_give_the_mean_of_their_probabilities(
    trained, image, tmp_path, edit
):
    """Two members with one spacing and one with another: each has a third of the weight."""

    def far(record):
        members.other_spacing(record)
        if edit:
            edit(record)

    paths = [members.variant(trained[1], tmp_path / f"{i}.ckpt", edit, i) for i in (1, 2)]
    paths.append(members.variant(trained[1], tmp_path / "far.ckpt", far, 3))
    predictor = Predictor.load(paths)
    near, third = (probabilities_of(Predictor.load(part), image) for part in (paths[:2], paths[2:]))
    probabilities = probabilities_of(predictor, image)
    np.testing.assert_allclose(probabilities, (2 * near + third) / 3, atol=1e-6)
    label = predictor(image)
    expected = probabilities.argmax(0) if edit is None else label_of_regions(probabilities)
    np.testing.assert_array_equal(label, expected)
    assert len(np.unique(label)) > 1


def test_members_of_nnunet_may_go_back_in_different_ways(tmp_path):
    """The one from thick slices takes the nearest slice, the other interpolates."""
    torch.manual_seed(0)
    alone = [
        replace(
            loaded_models.segmentation(nn.Conv3d(1, 2, 3, padding=1)),
            preprocessing=PreprocessingConfig(3, spacing, ("none",), ({},), convention="nnunet"),
        )
        for spacing in ((0.8, 0.8, 4.0), (1.5, 1.5, 1.5))
    ]
    path = tmp_path / "image.nii.gz"
    array = np.random.default_rng(0).uniform(1, 2, (12, 14, 16)).astype(np.float32)
    nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    predictor = Predictor(alone)
    assert {crop.nearest_axis for crop in predictor.read(Case("a", (path,))).crops} == {2, None}
    each = [probabilities_of(Predictor([member]), path) for member in alone]
    np.testing.assert_allclose(probabilities_of(predictor, path), np.mean(each, 0), atol=1e-6)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.update(modalities=["T1", "FLAIR"]), r"its channels differ: 2: T1, FLAIR; there 1: MRI$"),
        (
            lambda r: r["targets"].update(names=["box", "cyst"]),
            r"its targets differ: .*cyst=2; there .*hole=2$",
        ),
        (
            members.regions,
            r"its targets differ: regions: .*in order \[1, 2, 3\]; there label_map: box=1, hole=2$",
        ),
    ],
)
def test_members_of_different_tasks_are_refused(trained, tmp_path, edit, message):
    other = members.variant(trained[1], tmp_path / "b.ckpt", edit)
    with members.refused(rf"^{other}: cannot be averaged with {trained[1]}, {message}"):
        Predictor.load([trained[1], other])


def test_mirror_axes_and_windows_can_differ_from_those_of_validation(trained, image):
    plain = Predictor.load([trained[1]])
    other = Predictor.load([trained[1]], mirror_axes=[0, 1], overlap=0.25, sw_batch_size=1)
    window = other.members[0].window
    assert plain.members[0].window.mirror_axes == () and plain.members[0].window.overlap == 0.5
    assert (window.mirror_axes, window.overlap, window.batch_size) == ((0, 1), 0.25, 1)
    assert not torch.allclose(*(scores_of(p, image).logits[0] for p in (plain, other)), atol=1e-3)
    with members.refused(r"^mirror_axes=\[2\] needs a network trained on mirrored images: add \[2\]"):
        Predictor.load([trained[1]], mirror_axes=[2])
    with members.refused("^overlap must be at least 0 and below 1"):
        Predictor.load([trained[1]], overlap=1.5)


def noise(shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("factor", "warns"), [(1.9, False), (2.1, True), (0.52, False), (0.48, True)])
def test_a_spacing_far_from_that_of_training_gives_a_warning(trained, tmp_path, factor, warns):
    path = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(noise((16, 18, 12)), np.diag([1.0, 1.5 * factor, 2.0, 1.0])), path)
    warning = Predictor.load([trained[1]]).read(Case("a", (path,))).warning
    assert (warning is not None) == warns
    if warns:
        here = f"1 x {1.5 * factor:.3g} x 2 mm"
        assert here in warning and "training, 1 to 1 x 1.5 to 1.5 x 2 to 2 mm" in warning


def test_a_tilted_gantry_gives_a_warning(trained, tmp_path):
    affine = np.diag([1.0, 1.5, 2.0, 1.0])
    affine[1, 2] = 0.5
    nib.save(nib.Nifti1Image(noise((16, 18, 12)), affine), tmp_path / "a.nii.gz")
    case = Predictor.load([trained[1]]).read(Case("a", (tmp_path / "a.nii.gz",)))
    assert case.warning == "its axes are 14.0 degrees off a right angle; it is used as it is"


def test_arrays_and_nibabel_images_give_the_answer_of_their_file(trained, image):
    predictor = Predictor.load(trained[1])
    loaded = nib.load(image)
    array = np.asarray(loaded.dataobj)
    expected = predictor(image)
    np.testing.assert_array_equal(predictor(loaded), expected)
    np.testing.assert_array_equal(predictor(array, affine=loaded.affine), expected)
    label, probabilities = predictor.label_and_probabilities(array[None], affine=loaded.affine)
    np.testing.assert_array_equal(label, expected)
    np.testing.assert_array_equal(probabilities, probabilities_of(predictor, image))
    loaded.header.set_xyzt_units("micron")
    with pytest.raises(ValueError, match="image.nii.gz: its spacing is in microns, expected mm"):
        predictor(loaded)
    axis_aligned = predictor(array, spacing_mm=loaded.header.get_zooms())
    assert axis_aligned.shape == array.shape and axis_aligned.dtype == np.int16


ARRAY = np.ones((4, 5, 6), np.float32)


@pytest.mark.parametrize(
    ("images", "arguments", "message"),
    [
        (
            ["a.nii.gz"],
            {"spacing_mm": (1, 1, 1)},
            "spacing_mm is for an array; files and nibabel images have",
        ),
        (
            [ARRAY] * 2,
            {"affine": np.eye(4)},
            "images must be paths, nibabel images, or one array, got ndarray,",
        ),
        ([3], {}, "images must be paths, nibabel images, or one array, got int"),
    ],
)
def test_what_is_no_image_is_refused_by_name(images, arguments, message):
    with members.refused(f"^{message}"):
        Predictor([loaded_models.segmentation(nn.Conv3d(1, 2, 1))])(*images, **arguments)


def test_wrong_arguments_are_refused_by_name(trained):
    with members.refused("^checkpoints are needed"):
        Predictor.load([])
    with members.refused(r"^source_spacing_mm=\[1\]: expected positive numbers"):
        Predictor.load(trained[1], source_spacing_mm=[1])
    with members.refused("^sw_batch_size must be a whole number of at least 1, got 0"):
        Predictor.load(trained[1], sw_batch_size=0)


def test_a_stated_spacing_replaces_that_of_headers_but_not_of_arrays():
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1), source_spacing_mm=[2, 2, 2])
    predictor = Predictor([model])
    stated = predictor._input_of([nib.Nifti1Image(ARRAY, np.eye(4))], None, None)
    assert stated.crops[0].grid.spacing_mm == (2, 2, 2)
    assert predictor._input_of([ARRAY], np.eye(4), None).crops[0].grid.spacing_mm == (2, 2, 2)
    assert predictor._input_of([ARRAY], None, (1, 1, 1)).crops[0].grid.spacing_mm == (1, 1, 1)


def model(**changes):
    values = {
        "targets": SimpleNamespace(description="label_map: a=1"),
        "class_names": ("background", "a"),
        "modalities": ("T1",),
        "preprocessing": SimpleNamespace(image_dims=3),
        "source_spacing_mm": None,
        "path": "first.ckpt",
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preprocessing": SimpleNamespace(image_dims=2)}, "its images differ: 2D; there 3D"),
        ({"class_names": ("background", "b")}, "its classes differ: background, b; there background, a"),
        ({"source_spacing_mm": [1, 1, 7]}, r"its source_spacing_mm differ: \[1, 1, 7\]; there None"),
    ],
)
def test_what_differs_is_named(changes, message):
    with pytest.raises(ValueError, match=f"second.ckpt: cannot be averaged with first.ckpt, {message}"):
        check_same(model(), model(path="second.ckpt", **changes))
