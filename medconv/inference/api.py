"""Prediction from Python: `medconv.load`."""

from collections.abc import Sequence
from pathlib import Path

from medconv.inference.predict import usable_device
from medconv.inference.predictor import Predictor


def load(
    checkpoints: Path | str | Sequence[Path | str],
    device: str | None = None,
    *,
    trusted: Sequence[str] = (),
    mirror_axes: Sequence[int] | None = None,
    overlap: float | None = None,
    sw_batch_size: int | None = None,
    source_spacing_mm: Sequence[float] | None = None,
    progress: bool = True,
) -> Predictor:
    """A trained network, or the mean of several, as a function of an image.

    Called with an image (a path, a nibabel image, or an array with `affine` or `spacing_mm`), it returns the
    label map on the image's grid, (X, Y, Z) int16; see `inference.predictor.Predictor`. None keeps what each
    network was validated with.

    Args:
        checkpoints: a run's folder or its `checkpoints/best.ckpt`, or several, such as those of all folds.
        device: as torch names it; None: the GPU if there is one, else the CPU.
        trusted: packages of your own that the networks may come from; a checkpoint cannot choose code.
        mirror_axes: spatial axes of test-time augmentation; without numbers, no flips.
        overlap: of neighbouring windows, as a share of a window, from 0 to below 1.
        sw_batch_size: windows, or whole images, in one forward pass.
        source_spacing_mm: of the images, right, anterior, superior, in place of their headers'.
        progress: a bar counts the windows of an image, in a terminal, or in a notebook with ipywidgets.
    Raises:
        ArgumentError: a value out of range, a device that this machine lacks, or axes along which a network
            never saw mirrored images.
        ValueError: a file that cannot be read, no network, or networks of which no mean can be taken.
    Source:
        Means over folds as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    return Predictor.load(
        checkpoints,
        usable_device(device),
        trusted,
        mirror_axes=mirror_axes,
        overlap=overlap,
        sw_batch_size=sw_batch_size,
        source_spacing_mm=source_spacing_mm,
        progress=progress,
    )
