"""One export at work: what is written, and what that is compared with. What a format is."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from medconv.features.export.graph import Captured, MeanNetwork
from medconv.features.export.metadata import Metadata, describe, metadata_path
from medconv.features.export.parity import on_case, on_patches
from medconv.inference.load import LoadedModel
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import size_text

OPSETS = range(18, 24)  # of ONNX; torch writes 18 and converts it to later ones
TOLERANCE = 1e-4  # of the difference of logits, over the largest logit
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """How a network is written and compared.

    Args:
        format: a name in the door `EXPORTS`.
        opset: of ONNX; None: the lowest of `OPSETS`.
        case: an image to compare the logits on; None: random patches only.
        tolerance: the largest difference of logits that is allowed, over the largest logit.
    """

    format: str
    opset: int | None = None
    case: Path | None = None
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Job:
    """An export of a checkpoint's network.

    Args:
        model: the network with plain layers, which is written.
        reference: the network as it predicts, with our fast layers; what was written must give its logits.
        name: of the file or folder.
        choices: how it is written and compared.
    """

    model: LoadedModel
    reference: LoadedModel
    name: str
    choices: ExportOptions

    @cached_property
    def content(self) -> dict[str, Any]:
        """All that the checkpoint holds."""
        assert self.model.path is not None
        return checkpoint_io.read(self.model.path)

    def compare(self, written: nn.Module, larger: Sequence[int]) -> Metadata:
        """The largest difference of the logits of the written network, and on what.

        Args:
            written: as it was read back.
            larger: another size of images than the patch's, where the network takes one.
        Raises:
            ValueError: above the tolerance.
        """
        path, choices = self.reference.path, self.choices
        exported = replace(self.model, network=written)
        largest = on_patches(self.reference, exported, larger)
        inputs = "random patches"
        if choices.case is not None:
            difference, size = on_case(self.reference, exported, choices.case)
            largest = max(largest, difference)
            inputs = f"a case of {size_text(size)} voxels, and random patches"
        log.info("logits differ from the checkpoint's by at most %.2g, on %s", largest, inputs)
        # `not <=` and not `>`: NaN must fail, too.
        if not largest <= choices.tolerance:
            raise ValueError(
                f"{path}: as {choices.format} its logits differ by {largest:.2g} (on {inputs}), "
                f"more than the tolerance of {choices.tolerance:g}; nothing was written"
            )
        return {"largest_difference": largest, "tolerance": choices.tolerance, "inputs": inputs}

    def describe(self, file: Path, format: str, captured: Captured, parity: Metadata) -> Metadata:
        """The metadata of an exported file. Args: format: of the file. parity: as `compare` gives it."""
        metadata = describe(self.content, self.model, captured, file, format, parity)
        if isinstance(self.model.network, MeanNetwork):
            count = len(self.model.network.members)
            metadata["mean_of"] = f"{count} networks; training and validation are those of the first"
        return metadata


class Format:
    """What `medconv export --format NAME` writes: one file, with its metadata beside it, or a folder."""

    is_folder: ClassVar[bool] = False
    takes_mean: ClassVar[bool] = False  # whether it can hold the mean of several networks

    def check_packages(self) -> None:
        """Before anything is read. Raises: ValueError: a package that writes it is missing."""

    def check(self, model: LoadedModel, output: Path) -> None:
        """Before anything is written.

        Raises:
            ArgumentError: the output cannot have this name.
            ValueError: the format cannot hold the network.
        """

    def write(self, path: Path, job: Job) -> Metadata | None:
        """Write the network, and compare it. Args: path: a new file, or a folder that exists and is empty.

        Returns:
            What is written beside a file.
        Raises:
            ValueError: it cannot be written, or its logits differ.
        """
        raise NotImplementedError

    def notes(self, model: LoadedModel, output: Path) -> list[str]:
        """What the user is told once it is written: the first names it."""
        raise NotImplementedError


def write_metadata(metadata: Metadata, model: Path) -> None:
    """Write the metadata beside an exported file."""
    write_text(metadata_path(model), json.dumps(metadata, indent=2) + "\n")
