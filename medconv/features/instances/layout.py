"""`data=instances`: images, and label maps with a value for each object, by patterns or in two folders."""

from collections.abc import Mapping
from dataclasses import replace

from medconv.data.case import Dataset
from medconv.data.datasets.folder import pairs_of
from medconv.features.instances.objects import check_installed
from medconv.features.instances.targets import InstanceTargets


def instances(
    images: str | Mapping[str, str], labels: str, modality: str = "MRI", root: str | None = None
) -> Dataset:
    """Pairs of an image and an object map. Args: as of `pairs_of`.

    Raises: ValueError: as `pairs_of`, or scikit-image is not installed.
    """
    check_installed()
    targets = InstanceTargets()
    # Names and values of their files are those of objects, not of classes
    dataset = pairs_of(images, labels, modality, root).dataset(targets, "instances")
    return replace(dataset, class_names=("background", *targets.names))
