"""Cases in random order; a share of the patches is centred on foreground, as in nnU-Net."""

from medconv.data.loading.samplers.base import Sampler, TrainingCases, checked_share


class ForegroundSampler(Sampler):
    """Each round has each case once, or as often as its weight says; then the patch is placed.

    Args:
        foreground_share: of patches that are centred on a voxel of a random class of the case, 0 to 1. The
            others lie anywhere, or with a value to ignore are centred on a labelled voxel.
        by_weight: draw cases by their weights; None: where the weights differ.
    Raises:
        ValueError: a share that is none, or `by_weight` that contradicts the weights.
    """

    def __init__(self, cases: TrainingCases, foreground_share: float, by_weight: bool | None = None) -> None:
        super().__init__(cases)
        self.foreground_share = checked_share(foreground_share)
        if by_weight and self.weights is None:
            weight = cases.cases[0].weight
            raise ValueError(
                f"by_weight=true needs case weights that differ, but all {self.num_cases} cases have "
                f"weight {weight:g}"
            )
        if by_weight is False and self.weights is not None:
            raise ValueError(
                "by_weight=false draws each case equally often, but cases have weights from "
                f"{self.weights.min():g} to {self.weights.max():g}; by_weight=true draws by them"
            )
