"""Networks of nnU-Net v2: their plans as arguments of our U-Net, and our U-Net as a plan.

Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; classes and names of
https://github.com/MIC-DKFZ/dynamic-network-architectures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medconv.models.unet import UNet

_PACKAGE = "dynamic_network_architectures.architectures.unet."
_PLAIN = _PACKAGE + "PlainConvUNet"
_RESIDUAL = _PACKAGE + "ResidualEncoderUNet"
_ACTIVATIONS = ("torch.nn.LeakyReLU", "torch.nn.modules.activation.LeakyReLU")
_NORMS = {"instance": "instancenorm.InstanceNorm", "batch": "batchnorm.BatchNorm"}
_MODULES = "torch.nn.modules."


@dataclass(frozen=True)
class NnUNet:
    """The network of nnU-Net's plans; per stage, finest first.

    Args:
        channels: of each stage.
        strides: of each stage's first convolution.
        kernel_sizes: in voxels, per axis.
        convs: of the encoder; of a residual one, blocks of two.
        decoder_convs: as the decoder computes its stages, coarsest first.
        residual: whether the encoder has residual blocks.
        norm: `instance` or `batch`.
    """

    channels: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    kernel_sizes: tuple[tuple[int, ...], ...]
    convs: tuple[int, ...]
    decoder_convs: tuple[int, ...]
    residual: bool = False
    norm: str = "instance"

    @classmethod
    def of(cls, configuration: Mapping[str, Any]) -> "NnUNet":
        """From a configuration of plans.json, also of plans before version 2.4.

        Raises:
            ValueError: names the key whose value our U-Net cannot express.
            LookupError, TypeError: damaged.
        """
        class_name, settings = _architecture(configuration)
        if class_name not in (_PLAIN, _RESIDUAL):
            raise ValueError(
                f"network_class_name={class_name} is not supported, "
                "expected PlainConvUNet or ResidualEncoderUNet"
            )
        residual = class_name == _RESIDUAL
        _check_layers(settings, spatial_dims=len(settings["kernel_sizes"][0]))
        network = cls(
            channels=_integers(settings["features_per_stage"]),
            strides=tuple(_integers(stride) for stride in settings["strides"]),
            kernel_sizes=tuple(_integers(kernel) for kernel in settings["kernel_sizes"]),
            convs=_integers(settings["n_blocks_per_stage" if residual else "n_conv_per_stage"]),
            decoder_convs=_integers(settings["n_conv_per_stage_decoder"]),
            residual=residual,
            norm=_norm(settings, spatial_dims=len(settings["kernel_sizes"][0])),
        )
        network._check_stages(int(settings["n_stages"]))
        return network

    @classmethod
    def of_network(cls, network: UNet) -> "NnUNet":
        """The network of a plan that computes what this one does, if that is `strided`; in nnU-Net's axes."""
        strides = [(1,) * len(network.divisor), *network.strides]
        convs = network.residual_blocks or network.convs_per_stage
        return cls(
            channels=network.channels,
            strides=tuple(stride[::-1] for stride in strides),
            kernel_sizes=tuple(kernel[::-1] for kernel in network.kernel_sizes),
            convs=convs,
            decoder_convs=network.convs_per_stage[-2::-1],
            residual=network.residual_blocks is not None,
            norm=network.norm,
        )

    @property
    def architecture(self) -> dict[str, Any]:
        """As plans.json describes it."""
        spatial_dims = len(self.kernel_sizes[0])
        settings = {
            "n_stages": len(self.channels),
            "features_per_stage": list(self.channels),
            "conv_op": f"{_MODULES}conv.Conv{spatial_dims}d",
            "kernel_sizes": [list(kernel) for kernel in self.kernel_sizes],
            "strides": [list(stride) for stride in self.strides],
            "n_blocks_per_stage" if self.residual else "n_conv_per_stage": list(self.convs),
            "n_conv_per_stage_decoder": list(self.decoder_convs),
            "conv_bias": True,
            "norm_op": _norm_class(self.norm, spatial_dims),
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": _ACTIVATIONS[0],
            "nonlin_kwargs": {"inplace": True},
        }
        return {
            "network_class_name": _RESIDUAL if self.residual else _PLAIN,
            "arch_kwargs": settings,
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        }

    def _check_stages(self, stages: int) -> None:
        """Check that the lists fit together and to our U-Net.

        Raises:
            ValueError: they do not.
        """
        lists = (self.channels, self.strides, self.kernel_sizes, self.convs)
        if any(len(values) != stages for values in lists) or set(self.strides[0]) != {1}:
            raise ValueError(f"needs {stages} entries per stage, and a first stage with stride 1")
        # Our U-Net has one number for encoder and decoder, or, beside residual blocks, one for all stages.
        if self.residual:
            supported = self.decoder_convs[:1] * (stages - 1)
            rule = "as many in each"
        else:
            supported = self.convs[-2::-1]
            rule = "as many as in the encoder"
        if self.decoder_convs != supported:
            raise ValueError(
                f"n_conv_per_stage_decoder={list(self.decoder_convs)} is not supported, expected {rule}, "
                f"{list(supported)}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `UNet`, beside channels, strides and kernels."""
        arguments: dict[str, Any] = {"strided": True, "norm": self.norm}
        if self.residual:
            arguments["residual_blocks"] = list(self.convs)
            arguments["convs_per_stage"] = self.decoder_convs[0]
        else:
            arguments["convs_per_stage"] = list(self.convs)
        return arguments


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _architecture(configuration: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Class name and arguments of the network; those of older plans as later ones write them."""
    if "architecture" in configuration:
        architecture = configuration["architecture"]
        return str(architecture["network_class_name"]), architecture["arch_kwargs"]
    convs = configuration["n_conv_per_stage_encoder"]
    base_channels = int(configuration["UNet_base_num_features"])
    max_channels = int(configuration["unet_max_num_features"])
    spatial_dims = len(configuration["conv_kernel_sizes"][0])
    settings = {
        "n_stages": len(convs),
        "features_per_stage": [min(base_channels * 2**stage, max_channels) for stage in range(len(convs))],
        "kernel_sizes": configuration["conv_kernel_sizes"],
        "strides": configuration["pool_op_kernel_sizes"],
        "n_conv_per_stage": convs,
        "n_blocks_per_stage": convs,
        "n_conv_per_stage_decoder": configuration["n_conv_per_stage_decoder"],
        "norm_op": _norm_class("instance", spatial_dims),
        "nonlin": _ACTIVATIONS[0],
    }
    # older plans name the class without its module
    class_name = str(configuration["UNet_class_name"])
    if _PACKAGE + class_name in (_PLAIN, _RESIDUAL):
        class_name = _PACKAGE + class_name
    return class_name, settings


def _check_layers(settings: Mapping[str, Any], spatial_dims: int) -> None:
    """Check the kinds of layers.

    Raises:
        ValueError: a layer that our U-Net has not.
    """
    conv = f"{_MODULES}conv.Conv{spatial_dims}d"
    # None: null, or the plans have no such key
    supported: dict[str, tuple[Any, ...]] = {
        "conv_op": (None, conv, conv.replace(".modules.conv", "")),
        "norm_op_kwargs": (None, {"eps": 1e-5, "affine": True}),
        "dropout_op": (None,),
        "nonlin": _ACTIVATIONS,
        "nonlin_kwargs": (None, {}, {"inplace": True}, {"inplace": False}),
        "nonlin_first": (None, False),
        "bottleneck_channels": (None,),
        "stochastic_depth_p": (None, 0),
        "squeeze_excitation": (None, False),
        "stem_channels": (None,),
    }
    for key, values in supported.items():
        value = settings.get(key)
        if value not in values:
            raise ValueError(f"{key}={value} is not supported, expected {values[0] or values[-1]}")


def _norm(settings: Mapping[str, Any], spatial_dims: int) -> str:
    """Raises: ValueError: a norm that our U-Net has not."""
    given = settings["norm_op"]
    for name in _NORMS:
        long = _norm_class(name, spatial_dims)
        module = long.removeprefix(_MODULES).partition(".")[0]
        if given in (long, long.replace(f".modules.{module}", "")):
            return name
    expected = " or ".join(_norm_class(name, spatial_dims) for name in _NORMS)
    raise ValueError(f"norm_op={given} is not supported, expected {expected}")


def _norm_class(name: str, spatial_dims: int) -> str:
    return f"{_MODULES}{_NORMS[name]}{spatial_dims}d"
