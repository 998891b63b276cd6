"""Anatomy-aware convolutions for any network; usable without the rest of medconv: `from medconv.convs import swap_convs`."""

from medconv.convs.kernels import gaussian_jet
from medconv.convs.priors import TransformPrior, transform
from medconv.convs.swap import SwapReport, fold_convs, plain, swap_convs

__all__ = ["SwapReport", "TransformPrior", "fold_convs", "gaussian_jet", "plain", "swap_convs", "transform"]
