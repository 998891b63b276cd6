"""medconv/inference/predictor.py: label maps and probabilities, means over members, and inputs that do not
fit.
"""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import members
from torch.utils._python_dispatch import TorchDispatchMode

from medconv.data.case import Case
from medconv.data.io.images import read_image
from medconv.data.preprocessing.preprocess import preprocess, restore
from medconv.inference.predictor import Predictor, finite


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return members.train(tmp_path_factory.mktemp("predictor"))


@pytest.fixture(scope="module")
def image(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another spacing and orientation than the prepared grid, and zeros around what there is."""
    array = nib.load(trained[0] / "case_1.nii.gz").get_fdata().astype(np.float32)
    affine = np.array([[0, -1.2, 0, 3], [1.4, 0, 0, 4], [0, 0, 1.7, 5], [0, 0, 0, 1]])
    path = tmp_path_factory.mktemp("image") / "image.nii.gz"
    nib.save(nib.Nifti1Image(np.pad(array, ((1, 2), (0, 3), (2, 0))), affine), path)
    return path


def logits_of(predictor: Predictor, image: Path) -> list[torch.Tensor]:
    """Of each member by itself."""
    found = []
    for member in predictor.members:
        array, _ = preprocess(*read_image([image]), member.preprocessing)
        with torch.inference_mode():
            found.append(member.window(member.network, torch.from_numpy(array)[None])[0])
    return found


def stacked(predictor: Predictor, image: Path) -> np.ndarray:
    scores = predictor.scores(predictor.read(Case("x", (image,))))
    return np.stack(list(predictor.probabilities(scores)))


def test_one_member_is_what_validation_does(trained: tuple[Path, Path], image: Path) -> None:
    predictor = Predictor.load([trained[1]])
    (logits,) = logits_of(predictor, image)
    crop = predictor.read(Case("x", (image,))).crop
    label = predictor(image)
    assert label.shape == nib.load(image).shape and label.dtype == np.int16 and len(np.unique(label)) > 1
    np.testing.assert_array_equal(label, restore(logits, crop, predictor.targets.decode))


@pytest.mark.parametrize("edit", [None, members.regions])
def test_probabilities_fit_the_label_map(
    trained: tuple[Path, Path], image: Path, tmp_path: Path, edit
) -> None:
    predictor = Predictor.load([members.variant(trained[1], tmp_path / "a.ckpt", edit)])
    label, found = predictor(image), stacked(predictor, image)
    assert (
        found.shape == (3, *label.shape)
        and found.dtype == np.float32
        and found.min() >= 0
        and found.max() <= 1
    )
    if edit is None:
        np.testing.assert_allclose(found.sum(0), 1, rtol=1e-5)
        np.testing.assert_array_equal(found.argmax(0), label)
    else:
        wanted = np.zeros_like(label)
        for value, region in zip((1, 2, 3), found, strict=True):
            wanted[region > 0.5] = value
        np.testing.assert_array_equal(wanted, label)
        assert not np.allclose(found.sum(0), 1)
    outside = np.ones(label.shape, bool)
    outside[1:-2, : label.shape[1] - 3, 2:] = False
    assert (label[outside] == 0).all()
    np.testing.assert_array_equal(found[:, outside], np.tile([[edit is None], [0], [0]], (1, outside.sum())))


def test_members_of_one_preprocessing_give_the_mean_of_their_logits(
    trained: tuple[Path, Path], image: Path, tmp_path: Path
) -> None:
    other = members.variant(trained[1], tmp_path / "b.ckpt")
    predictor = Predictor.load([trained[1], other])
    scores = predictor.scores(predictor.read(Case("x", (image,))))
    a, b = logits_of(predictor, image)
    assert len(scores.logits) == 1
    torch.testing.assert_close(scores.logits[0], (a + b) / 2)
    np.testing.assert_array_equal(
        predictor(image), restore((a + b) / 2, scores.crop, predictor.targets.decode)
    )
    assert any((predictor(image) != Predictor.load([path])(image)).any() for path in (trained[1], other))


@pytest.mark.parametrize("edit", [None, members.regions])
def test_members_of_other_preprocessings_give_the_mean_of_their_probabilities(
    trained: tuple[Path, Path], image: Path, tmp_path: Path, edit
) -> None:
    """Two of one spacing and one of another: each has a third of the weight."""

    def far(record) -> None:
        members.other_spacing(record)
        if edit:
            edit(record)

    paths = [members.variant(trained[1], tmp_path / f"{i}.ckpt", edit, i) for i in (1, 2)]
    paths.append(members.variant(trained[1], tmp_path / "far.ckpt", far, 3))
    predictor = Predictor.load(paths)
    near, third = stacked(Predictor.load(paths[:2]), image), stacked(Predictor.load(paths[2:]), image)
    found = stacked(predictor, image)
    np.testing.assert_allclose(found, (2 * near + third) / 3, atol=1e-6)
    label = predictor(image)
    if edit is None:
        np.testing.assert_array_equal(label, found.argmax(0))
    else:
        wanted = np.zeros_like(label)
        for value, region in zip((1, 2, 3), found, strict=True):
            wanted[region > 0.5] = value
        np.testing.assert_array_equal(label, wanted)
    assert len(np.unique(label)) > 1


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (
            lambda r: r.update(modalities=["T1", "FLAIR"]),
            r"its channels differ: 2: T1, FLAIR; there 1: MRI$",
        ),
        (
            lambda r: r["targets"].update(names=["box", "cyst"]),
            r"its classes differ: .*cyst=2\); there .*hole=2\)$",
        ),
        (
            members.regions,
            r"its classes differ: .*in order \[1, 2, 3\]\); there .*\(box=1, hole=2\)$",
        ),
    ],
)
def test_members_of_different_tasks_are_refused(
    trained: tuple[Path, Path], tmp_path: Path, edit, wanted: str
) -> None:
    other = members.variant(trained[1], tmp_path / "b.ckpt", edit)
    with members.refused(rf"^{other}: cannot be averaged with {trained[1]}, {wanted}"):
        Predictor.load([trained[1], other])


def test_mirror_axes_and_windows_can_be_other_than_validated(trained: tuple[Path, Path], image: Path) -> None:
    plain = Predictor.load([trained[1]])
    other = Predictor.load([trained[1]], mirror_axes=[0, 1], overlap=0.25, sw_batch_size=1)
    window = other.members[0].window
    assert plain.members[0].window.mirror_axes == () and plain.members[0].window.overlap == 0.5
    assert (window.mirror_axes, window.overlap, window.batch_size) == ((0, 1), 0.25, 1)
    assert not torch.allclose(
        *(p.scores(p.read(Case("x", (image,)))).logits[0] for p in (plain, other)), atol=1e-3
    )
    with members.refused(r"--mirror-axes=\[2\] needs a network trained on mirrored images: add \[2\]"):
        Predictor.load([trained[1]], mirror_axes=[2])
    with members.refused("overlap must be at least 0 and below 1"):
        Predictor.load([trained[1]], overlap=1.5)


def test_the_test_for_finite_logits_looks_at_one_channel_at_a_time() -> None:
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not result._is_view():
                self.largest = max(self.largest, result.numel())
            return result

    logits = torch.zeros(5, 4, 4, 4)
    with Sizes() as sizes:
        assert finite(logits)
    assert 0 < sizes.largest <= 64
    for odd in (torch.nan, torch.inf):
        logits[3, 1, 2, 3] = odd
        assert not finite(logits)


@pytest.mark.parametrize(("factor", "warns"), [(1.9, False), (2.1, True), (0.52, False), (0.48, True)])
def test_a_spacing_far_from_training_is_warned_of(
    trained: tuple[Path, Path], tmp_path: Path, factor: float, warns: bool
) -> None:
    path = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(np.ones((16, 18, 12), np.float32), np.diag([1.0, 1.5 * factor, 2.0, 1.0])), path)
    warning = Predictor.load([trained[1]]).read(Case("a", (path,))).warning
    assert (warning is not None) == warns
    if warns:
        here = f"1 x {1.5 * factor:.3g} x 2 mm"
        assert here in warning and "training, 1 to 1 x 1.5 to 1.5 x 2 to 2 mm" in warning


def test_numbers_that_are_not_finite_are_no_prediction(trained: tuple[Path, Path], image: Path) -> None:
    predictor = Predictor.load([trained[1]])
    next(predictor.members[0].network.parameters()).data.fill_(float("nan"))
    with members.refused(r"the network's logits are not finite \(trainer\.precision=32-true\)"):
        predictor(image)


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (
            lambda r: r["config"]["task"].update(_target_="somewhere.Detection"),
            "its task is somewhere.Detection",
        ),
        (lambda r: r.pop("preprocessing"), "damaged, or of another version.*preprocessing"),
        (lambda r: r.update(config={}), "damaged, or of another version.*task"),
    ],
)
def test_checkpoints_that_are_not_for_this(
    trained: tuple[Path, Path], tmp_path: Path, edit, wanted: str
) -> None:
    path = members.variant(trained[1], tmp_path / "b.ckpt", edit)
    with members.refused(rf"^{path}: .*{wanted}"):
        Predictor.load([path])
