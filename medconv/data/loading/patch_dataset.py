"""Training patches and validation cases, read from the store in loader workers.

Every training sample is a pure function of (seed, sample number): case, position and augmentation. Sample
numbers continue over epochs, so workers, ranks and restarts do not change sample n. A case may lack labels
(`Annotated`) or channels (`ChannelDropout`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import monai.data
import numpy as np
import torch
from torch import Tensor

from medconv.data.augmentation.blocks import Blocks
from medconv.data.case import Case
from medconv.data.case_files import label_on
from medconv.data.loading.patch import PackedReading, PatchShape, Sample, crop, pack
from medconv.data.loading.samplers import Sampler
from medconv.data.preprocessing.preprocess import Entry
from medconv.data.preprocessing.store import Store
from medconv.data.random_streams import RandomStream, generator
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets, over_voxels


class Annotated(NamedTuple):
    """What is annotated in a case that lacks some labels.

    Args:
        values: label values that are annotated.
        outputs: as `targets.annotated_outputs`.
    """

    values: tuple[int, ...]
    outputs: tuple[bool, ...]


def annotated_classes(
    cases: Sequence[Case], targets: Targets, class_names: Sequence[str]
) -> dict[str, Annotated]:
    """The annotated classes of every case, by its id; of label maps."""
    assert isinstance(targets, SegmentationTargets)
    all_values = tuple(range(1, len(class_names)))
    annotated = {}
    for case in cases:
        values = case.annotated or all_values
        annotated[case.id] = Annotated(values, targets.annotated_outputs(values))
    return annotated


@dataclass(frozen=True)
class ChannelDropout:
    """Makes a network that can do without some channels: it sees samples in which these are 0.

    Args:
        probability: with which each channel is dropped, below 1; at least one that the case has is kept.
        num_channels: of the network.
        missing: case id to the channels that it lacks, where it lacks some.
        seed: of the run.
    Source: modality dropout, Neverova et al. 2015, arXiv:1501.00102.
    """

    probability: float
    num_channels: int
    missing: Mapping[str, tuple[int, ...]]
    seed: int

    def kept(self, case_id: str, sample: int) -> Tensor:
        """Which channels a sample shows; the same for the same seed. Shape: (channels,) bool."""
        rng = generator(self.seed, RandomStream.CHANNELS, sample)
        missing = self.missing.get(case_id, ())
        present = [channel for channel in range(self.num_channels) if channel not in missing]
        # An image of zeros alone would teach nothing
        spared = present[rng.integers(len(present))]
        is_dropped = rng.random(self.num_channels) < self.probability
        is_dropped[list(missing)] = True
        if is_dropped.all():
            is_dropped[spared] = False
        return torch.from_numpy(~is_dropped)


def without_dropped(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose images are 0 in channels that are not `kept`; after augmentation, which adds to zeros.

    Shape: image (batch, channels, *spatial), kept (batch, channels) bool.
    """
    image = batch["image"]
    kept = over_voxels(batch["kept"], image)
    return {**batch, "image": torch.where(kept, image, 0)}


class PatchDataset(monai.data.Dataset):
    """Patches for training; index n is sample number n, without an upper limit.

    Item: image (channels, *size) float32, label (1, *size) uint8 or int16, of probabilities (classes,
    *size) float16, sample n; size is the patch's, or that of `read_size(n)`; where cases lack labels,
    annotated (outputs,) bool; of cases with values beside a label map, values (values,) float32. With
    `packed`, image and label are (channels, voxels), and blocks (blocks, 2, axes) say which voxels of the
    box these are: begin and end; what the image lacks is left out.
    Args:
        cases: ids in the store, in the order of the sampler's indices.
        patch: smaller images are padded with 0 on both sides.
        annotated: by case id, where cases lack labels.
        values: by case id, of cases that have some.
        read_size: sample number to the voxels to read around the patch's centre; None: the patch size.
        packed: read blocks of a box around the patch's centre instead.
        channel_dropout: adds which channels are `kept`, (channels,) bool.
        transform: applied to each sample, as of `augmentation=monai`; MONAI's own transforms draw new
            random numbers in each worker and run.
    """

    def __init__(
        self,
        store: Store,
        cases: Sequence[str],
        sampler: Sampler,
        patch: PatchShape,
        *,
        annotated: Mapping[str, Annotated] | None = None,
        values: Mapping[str, tuple[float, ...]] | None = None,
        read_size: Callable[[int], Sequence[int]] | None = None,
        packed: PackedReading | None = None,
        channel_dropout: ChannelDropout | None = None,
        transform: Callable[[Sample], Sample] | None = None,
    ) -> None:
        super().__init__(cases, transform)  # MONAI makes a `Compose` of it, which does nothing for None
        # One block of memory: reference counts of strings would copy their pages into each worker.
        self.data: Any = np.array(cases)
        self.store = store
        self.sampler = sampler
        self.patch = patch
        self.annotated = annotated or {}
        self.values = values or {}
        self.read_size = read_size
        self.packed = packed
        self.channel_dropout = channel_dropout

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        case_id = self.case_of(index)
        entry = self.store.read(case_id)
        corner = self.sampler.corner(index, entry)
        # What augmentation needs is larger than the patch, and has its centre
        size = self.patch.size
        if self.packed is not None:
            size = self.packed.box_size
        elif self.read_size is not None:
            size = self.read_size(index)
        box = self.patch.box_of(size)
        corner = corner - np.subtract(box, self.patch.box) // 2
        if self.packed is not None:
            sample = self._packed(entry, corner, self.packed.blocks_of(index))
        else:
            image = self.patch.without_slice_axis(crop(entry.image, corner, box))
            label = self.patch.without_slice_axis(crop(entry.training_label, corner, box))
            sample = {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}
        sample["sample"] = index
        if case_id in self.annotated:
            sample["annotated"] = torch.tensor(self.annotated[case_id].outputs)
        if case_id in self.values:
            sample["values"] = torch.tensor(self.values[case_id])
        if self.channel_dropout is not None:
            sample["kept"] = self.channel_dropout.kept(case_id, index)
        return self.transform(sample)  # type: ignore[no-any-return]

    def _packed(self, entry: Entry, corner: np.ndarray, blocks: Blocks) -> Sample:
        """Image, label and blocks of a box. Args: corner: of the box. blocks: that are read of it."""
        blocks = self.patch.blocks_of(blocks).shifted(corner).inside(entry.label.shape)
        of_box = self.patch.without_slice_axis_of(blocks.shifted(-corner))
        return {
            "image": pack(entry.image, blocks),
            "label": pack(entry.training_label, blocks),
            "blocks": torch.from_numpy(np.stack([of_box.begin, of_box.end], 1)),
        }

    def case_of(self, index: int) -> str:
        """The case id of a sample; reads no file."""
        return str(self.data[self.sampler.case_index(index)])

    def describe(self, index: int) -> tuple[str, str]:
        """The case of a sample, and a description of the sample."""
        return self.case_of(index), f"training sample {index}"


class Opaque:
    """A value of a batch that Lightning does not look into.

    With `trainer.precision=bf16-true` and its like it copies dataclasses field by field, and fails on frozen
    ones.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class CaseDataset(monai.data.Dataset):
    """Whole cases for validation.

    Item: image (1, channels, *spatial), label (1, 1, *spatial), reference (X, Y, Z) on the native grid, case
    id, the spacing_mm of the prepared image and its crop_info; where cases lack labels, annotated, a bool for
    each output.
    Args: own_reference: `reference` of `Family.labels`, with its targets; None: labels are label maps.
    """

    def __init__(
        self,
        store: Store,
        cases: Sequence[Case],
        annotated: Mapping[str, Annotated] | None = None,
        own_reference: Callable[..., Sample] | None = None,
    ) -> None:
        super().__init__(list(cases))
        self.store = store
        self.annotated = annotated or {}
        self.own_reference = own_reference

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        case: Case = self.data[index]
        assert case.label is not None
        entry = self.store.read(case.id, verify=True)  # all of it is read anyway
        item: Sample = {
            "spacing_mm": entry.crop_info.spacing_mm(entry.label.shape),
            # Copies: the store's arrays are read-only memory maps.
            "image": torch.from_numpy(np.array(entry.image))[None],
            "label": torch.from_numpy(np.array(entry.training_label))[None],
            "crop_info": Opaque(entry.crop_info),
            "case": case.id,
        }
        grid = entry.crop_info.grid
        if self.own_reference is not None:
            item |= self.own_reference(case, grid)
        else:
            item["reference"] = torch.from_numpy(label_on(case, grid))
        if self.annotated:
            item["annotated"] = self.annotated[case.id].outputs
        if case.values is not None:
            item["values"] = torch.tensor(case.values)
        return item

    def describe(self, index: int) -> tuple[str, str]:
        """The case, and its purpose."""
        return self.data[index].id, "validation"
