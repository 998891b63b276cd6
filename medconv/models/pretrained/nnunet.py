"""Networks of nnU-Net v2: their plans as arguments of our U-Net, their weights by our names.

Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; classes and names of
https://github.com/MIC-DKFZ/dynamic-network-architectures.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PACKAGE = "dynamic_network_architectures.architectures.unet."
_PLAIN = _PACKAGE + "PlainConvUNet"
_RESIDUAL = _PACKAGE + "ResidualEncoderUNet"
_ACTIVATIONS = ("torch.nn.LeakyReLU", "torch.nn.modules.activation.LeakyReLU")
_LAYER = r"\.(conv|norm)\.(weight|bias)"
_STAGE = re.compile(r"encoder\.stages\.(\d+)\.")
_CONV = re.compile(r"(encoder|decoder)\.(?:stem|stages\.(\d+))(?:\.0)?\.convs\.(\d+)" + _LAYER)
_BLOCK = re.compile(r"encoder\.stages\.(\d+)\.blocks\.(\d+)\.(conv|skip\.)(\d)" + _LAYER)
_UP = re.compile(r"decoder\.transpconvs\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"decoder\.seg_layers\.(\d+)\.(weight|bias)")  # all but the finest serve training alone
# biases before a norm, and second names of the same tensors
_UNUSED = re.compile(r".*\.conv\.bias|.*\.all_modules\.\d+\.(weight|bias)|decoder\.encoder\..*")
_MODULES_PER_CONV = 3  # in our blocks: convolution, norm, activation
Axes = Sequence[int]


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
    """

    channels: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    kernel_sizes: tuple[tuple[int, ...], ...]
    convs: tuple[int, ...]
    decoder_convs: tuple[int, ...]
    residual: bool = False

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
        )
        network._check_stages(int(settings["n_stages"]))
        return network

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
        arguments: dict[str, Any] = {"strided": True, "norm": "instance"}
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
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{spatial_dims}d",
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
    norm = f"torch.nn.modules.instancenorm.InstanceNorm{spatial_dims}d"
    conv = f"torch.nn.modules.conv.Conv{spatial_dims}d"
    # None: null, or the plans have no such key
    supported: dict[str, tuple[Any, ...]] = {
        "conv_op": (None, conv, conv.replace(".modules.conv", "")),
        "norm_op": (norm, norm.replace(".modules.instancenorm", "")),
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


def by_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors; those of a network of nnU-Net or nnssl, under whatever prefix, as `unet_weights`."""
    prefix = _network_prefix(tensors)
    if prefix is None:
        return dict(tensors)
    state = {name.removeprefix(prefix): value for name, value in tensors.items()}
    weights, unknown = unet_weights(state)
    # The unknown ones stay under their names, to be reported as not used.
    return {**weights, **{name: state[name] for name in unknown}}


def _network_prefix(names: Mapping[str, Tensor]) -> str | None:
    """What stands before nnU-Net's own names; None: the file has none of them."""
    for name in names:
        for pattern in (_CONV, _BLOCK):
            match = re.match(rf"(.*?){pattern.pattern}$", name)
            if match is not None:
                return match[1]
    return None


def unet_weights(
    state: Mapping[str, Tensor], axes: Axes | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights by the names of `UNet(strided=True)`, and the names of tensors that it has not.

    A bias before an instance norm has no effect, so our convolutions have none.

    Args:
        state: of a whole network, or of its encoder or decoder.
        axes: nnU-Net's spatial axis that becomes each of ours; None: the opposite order.
    Returns:
        Weights by our names; names that no such network has.
    """
    # The decoder has one stage less than the encoder, and counts from the coarsest.
    stages = [int(match[1]) for match in map(_STAGE.match, state) if match is not None]
    finest = max(stages, default=0) - 1
    weights: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, value in state.items():
        our_name = _our_name(name, finest)
        if our_name is None:
            unknown.append(name)
        elif our_name:
            weights[our_name] = _with_our_axes(value, axes).float().contiguous()
    for stage in range(finest + 1):  # of coarse and skip, where ours takes skip and coarse
        first_conv = f"decoder.{stage}.0.weight"
        if first_conv in weights:
            coarse_and_skip = weights[first_conv].chunk(2, 1)
            weights[first_conv] = torch.cat(coarse_and_skip[::-1], 1)
    return weights, unknown


def _with_our_axes(value: Tensor, axes: Axes | None) -> Tensor:
    """A kernel (out, in, *spatial) with its spatial axes in our order; vectors as they are."""
    spatial_dims = value.ndim - 2
    if spatial_dims <= 0:
        return value
    order = axes or range(spatial_dims)[::-1]
    return value.permute(0, 1, *[2 + axis for axis in order])


def _our_name(name: str, finest: int) -> str | None:
    """The name in our U-Net; empty: it needs none of it; None: not a tensor of such networks.

    Args:
        finest: the finest stage of the decoder, of which the coarsest is 0; ours count the other way.
    """
    if _UNUSED.fullmatch(name):
        return ""
    match = _CONV.fullmatch(name)
    if match is not None:
        return _our_conv(match, finest)
    match = _BLOCK.fullmatch(name)
    if match is not None:
        return _our_residual(match)
    match = _UP.fullmatch(name)
    if match is not None:
        stage, parameter = match.groups()
        return f"up.{finest - int(stage)}.{parameter}"
    match = _HEAD.fullmatch(name)
    if match is None:
        return None
    stage, parameter = match.groups()
    return f"head.{parameter}" if int(stage) == finest else ""


def _our_conv(match: re.Match[str], finest: int) -> str:
    """Of the stem, or of a stage of plain convolutions."""
    side, stage, number, layer, parameter = match.groups()
    if stage is None:  # the stem, which is in our first stage
        our_stage = "0.0"
    elif side == "encoder":
        our_stage = stage
    else:
        our_stage = str(finest - int(stage))
    index = _MODULES_PER_CONV * int(number) + (layer == "norm")
    return f"{side}.{our_stage}.{index}.{parameter}"


def _our_residual(match: re.Match[str]) -> str:
    """Of a residual block of the encoder, or of its skip."""
    stage, block, branch, number, layer, parameter = match.groups()
    if branch == "conv":  # counted from 1
        our_branch = "convs"
        index = _MODULES_PER_CONV * (int(number) - 1)
    else:  # in a skip averaging comes before the projection
        our_branch = "skip"
        index = int(number)
    index += layer == "norm"
    our_block = int(block) + (stage == "0")  # after the stem
    return f"encoder.{stage}.{our_block}.{our_branch}.{index}.{parameter}"
