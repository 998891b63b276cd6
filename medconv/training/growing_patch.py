"""`schedule.patch=progressive`: training sees a part of each patch, which grows until it is whole."""

from collections.abc import Sequence

from medconv.data.loading.datamodule import Batch

_FIRST_SHARE = 0.5  # share of a patch's edge at the start
_WHOLE_FROM = 0.8  # progress of the run from which on patches are whole
_MIN_EDGE = 2  # voxels at the coarsest stage


class GrowingPatch:
    """Cuts the middle out of all patches of a batch, so that most steps become cheaper.

    An edge grows in proportion to the progress of the run, in steps of what the network divides it by.

    Args:
        divisor: of the network, per axis.
    Source: Fischer et al. 2024, arXiv:2407.07853.
    """

    def __init__(self, divisor: Sequence[int]) -> None:
        self.divisor = tuple(divisor)

    def size(self, patch: Sequence[int], progress: float) -> tuple[int, ...]:
        """Voxels to train on, per axis.

        Args:
            patch: the whole patch, in voxels.
            progress: of the run, 0 to 1.
        """
        share = min(1.0, _FIRST_SHARE + (1 - _FIRST_SHARE) * progress / _WHOLE_FROM)
        edges = []
        for whole_edge, divisor in zip(patch, self.divisor, strict=True):
            num_multiples = -(-round(share * whole_edge) // divisor)  # rounded up
            edge = max(_MIN_EDGE, num_multiples) * divisor
            edges.append(min(whole_edge, edge))
        return tuple(edges)

    def __call__(self, batch: Batch, progress: float) -> Batch:
        """Shape: image, label (batch, channels, *spatial) -> the same with `size` in place of spatial."""
        patch = batch["image"].shape[2:]
        size = self.size(patch, progress)
        slices = []
        for whole_edge, edge in zip(patch, size, strict=True):
            start = (whole_edge - edge) // 2
            slices.append(slice(start, start + edge))
        middle = (..., *slices)
        return {
            **batch,
            "image": batch["image"][middle],
            "label": batch["label"][middle],
        }
