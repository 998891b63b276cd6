"""Anatomy-aware convolutions for any network, also without the rest of medconv."""

from medconv.convs.acs import acs, load_plane_weight
from medconv.convs.autograd import Convolution, convolution
from medconv.convs.channel_transform import TransformPrior, transform
from medconv.convs.factorised import bottleneck, separable
from medconv.convs.filter_banks import filter_bank, gabor, gaussian_jet, laplacian_of_gaussian, lines
from medconv.convs.linear import ball, basis, spacing
from medconv.convs.masked import masked
from medconv.convs.parametrization import fold_convs, mirror_axes
from medconv.convs.smooth import smooth
from medconv.convs.squeeze_excitation import se
from medconv.convs.swap import NetworkConversion, SwapReport, plain, swap_convs

__all__ = [
    "Convolution",
    "NetworkConversion",
    "SwapReport",
    "TransformPrior",
    "acs",
    "ball",
    "basis",
    "bottleneck",
    "convolution",
    "filter_bank",
    "fold_convs",
    "gabor",
    "gaussian_jet",
    "laplacian_of_gaussian",
    "lines",
    "load_plane_weight",
    "masked",
    "mirror_axes",
    "plain",
    "se",
    "separable",
    "smooth",
    "spacing",
    "swap_convs",
    "transform",
]
