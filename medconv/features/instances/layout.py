"""`data=instances`: images, and label maps with a value for each object, by patterns or in two folders."""

from collections.abc import Mapping
from dataclasses import replace

from medconv.data.case import Dataset
from medconv.data.datasets.folder import folder
from medconv.features.instances.objects import check_installed
from medconv.features.instances.targets import InstanceTargets


def instances(
    images: str | Mapping[str, str], labels: str, modality: str = "MRI", root: str | None = None
) -> Dataset:
    """Pairs of an image and an object map. Args: as of `folder`.

    Raises: ValueError: as `folder`, or scikit-image is not installed.
    """
    check_installed()
    targets = InstanceTargets()
    dataset = folder(images, labels, ["background", *targets.names], modality, root)
    return replace(dataset, targets=targets)
