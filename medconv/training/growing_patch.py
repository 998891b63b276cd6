"""`schedule.patch=progressive`: training sees a part of each patch, which grows until it is whole."""

from collections.abc import Sequence

from medconv.data.loading.datamodule import Batch

_BEGIN = 0.5  # share of a patch's edge at the start
_WHOLE = 0.8  # progress of the run from which on patches are whole
_LEAST = 2  # voxels at the coarsest stage


class GrowingPatch:
    """Cuts the middle out of all patches of a batch, so that most steps become cheaper.

    An edge grows in proportion to the progress of the run, in steps of what the network divides it by.
    Args: divisor: of the network, per axis.
    Source: Fischer et al. 2024, arXiv:2407.07853.
    """

    def __init__(self, divisor: Sequence[int]) -> None:
        self.divisor = tuple(divisor)

    def size(self, patch: Sequence[int], progress: float) -> tuple[int, ...]:
        """Voxels to train on. Args: patch: whole. progress: of the run, 0 to 1."""
        share = min(1.0, _BEGIN + (1 - _BEGIN) * progress / _WHOLE)
        return tuple(
            min(n, max(_LEAST * d, -(-round(share * n) // d) * d))
            for n, d in zip(patch, self.divisor, strict=True)
        )

    def __call__(self, batch: Batch, progress: float) -> Batch:
        """Shape: image, label (batch, channels, *spatial) -> the same with `size` in place of spatial."""
        whole = batch["image"].shape[2:]
        size = self.size(whole, progress)
        begins = [(n - m) // 2 for n, m in zip(whole, size, strict=True)]
        cut = (..., *(slice(b, b + m) for b, m in zip(begins, size, strict=True)))
        return {**batch, "image": batch["image"][cut], "label": batch["label"][cut]}
