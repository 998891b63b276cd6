"""Networks of nnU-Net v2: their plans as arguments of our U-Net, their weights by our names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLACE = "dynamic_network_architectures.architectures.unet."
_PLAIN, _RESIDUAL = _PLACE + "PlainConvUNet", _PLACE + "ResidualEncoderUNet"
_ACTIVATIONS = ("torch.nn.LeakyReLU", "torch.nn.modules.activation.LeakyReLU")
_LAYER = r"\.(conv|norm)\.(weight|bias)"
_STAGE = re.compile(r"encoder\.stages\.(\d+)\.")
_CONV = re.compile(r"(encoder|decoder)\.(?:stem|stages\.(\d+))(?:\.0)?\.convs\.(\d+)" + _LAYER)
_BLOCK = re.compile(r"encoder\.stages\.(\d+)\.blocks\.(\d+)\.(conv|skip\.)(\d)" + _LAYER)
_UP = re.compile(r"decoder\.transpconvs\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"decoder\.seg_layers\.(\d+)\.(weight|bias)")  # all but the finest serve training alone
# biases before a norm, and second names of the same tensors
_UNUSED = re.compile(r".*\.conv\.bias|.*\.all_modules\.\d+\.(weight|bias)|decoder\.encoder\..*")
Axes = Sequence[int]


@dataclass(frozen=True)
class NnUNet:
    """The network of nnU-Net's plans; per stage, finest first.

    Args:
        strides: of each stage's first convolution.
        convs: of the encoder; of a residual one, blocks of two.
        decoder_convs: as the decoder computes its stages, coarsest first.
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

        Raises: ValueError: names the key whose value our U-Net cannot express. LookupError, TypeError:
            damaged.
        """
        class_name, settings = _architecture(configuration)
        if class_name not in (_PLAIN, _RESIDUAL):
            expected = "PlainConvUNet or ResidualEncoderUNet"
            raise ValueError(f"network_class_name={class_name} is not supported, expected {expected}")
        residual = class_name == _RESIDUAL
        dims = len(settings["kernel_sizes"][0])
        _check_layers(settings, dims)
        stages = int(settings["n_stages"])
        network = cls(
            tuple(map(int, settings["features_per_stage"])),
            tuple(tuple(map(int, stride)) for stride in settings["strides"]),
            tuple(tuple(map(int, kernel)) for kernel in settings["kernel_sizes"]),
            tuple(map(int, settings["n_blocks_per_stage" if residual else "n_conv_per_stage"])),
            tuple(map(int, settings["n_conv_per_stage_decoder"])),
            residual,
        )
        lists = (network.channels, network.strides, network.kernel_sizes, network.convs)
        if any(len(values) != stages for values in lists) or set(network.strides[0]) != {1}:
            raise ValueError(f"needs {stages} entries per stage, and a first stage with stride 1")
        like = network.decoder_convs[:1] * (stages - 1) if residual else network.convs[-2::-1]
        if network.decoder_convs != like:
            what = "as many in each" if residual else "as many as in the encoder"
            raise ValueError(
                f"n_conv_per_stage_decoder={list(network.decoder_convs)} is not supported, expected {what}, "
                f"{list(like)}"
            )
        return network

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `UNet`, beside channels, strides and kernels."""
        convs: dict[str, Any] = {"convs_per_stage": list(self.convs)}
        if self.residual:
            convs = {"residual_blocks": list(self.convs), "convs_per_stage": self.decoder_convs[0]}
        return {"strided": True, "norm": "instance", **convs}


def _architecture(configuration: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Class name and arguments."""
    if "architecture" in configuration:
        architecture = configuration["architecture"]
        return str(architecture["network_class_name"]), architecture["arch_kwargs"]
    convs, base = configuration["n_conv_per_stage_encoder"], int(configuration["UNet_base_num_features"])
    dims, most = len(configuration["conv_kernel_sizes"][0]), int(configuration["unet_max_num_features"])
    settings = {
        "n_stages": len(convs),
        "features_per_stage": [min(base * 2**stage, most) for stage in range(len(convs))],
        "kernel_sizes": configuration["conv_kernel_sizes"],
        "strides": configuration["pool_op_kernel_sizes"],
        "n_conv_per_stage": convs,
        "n_blocks_per_stage": convs,
        "n_conv_per_stage_decoder": configuration["n_conv_per_stage_decoder"],
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "nonlin": _ACTIVATIONS[0],
    }
    name = configuration["UNet_class_name"]
    return (_PLACE + name if name in ("PlainConvUNet", "ResidualEncoderUNet") else str(name)), settings


def _check_layers(settings: Mapping[str, Any], dims: int) -> None:
    """Raises: ValueError: a layer that our U-Net has not."""
    norm = f"torch.nn.modules.instancenorm.InstanceNorm{dims}d"
    conv = f"torch.nn.modules.conv.Conv{dims}d"
    allowed: dict[str, tuple[Any, ...]] = {
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
    for key, values in allowed.items():
        if (value := settings.get(key)) not in values:
            raise ValueError(f"{key}={value} is not supported, expected {values[0] or values[-1]}")


def by_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors; those of a network of nnU-Net or nnssl, under whatever prefix, as `unet_weights`."""
    names = (re.match(rf"(.*?){pattern.pattern}$", name) for name in tensors for pattern in (_CONV, _BLOCK))
    first = next(filter(None, names), None)
    if first is None:
        return dict(tensors)
    theirs = {name.removeprefix(first[1]): value for name, value in tensors.items()}
    weights, unknown = unet_weights(theirs)
    return {**weights, **{name: theirs[name] for name in unknown}}


def unet_weights(
    state: Mapping[str, Tensor], axes: Axes | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights by the names of `UNet(strided=True)`, of a whole network or of a part of it, and the names
    of tensors that no such network has.

    A bias before an instance norm has no effect, so our convolutions have none.
    Args: axes: nnU-Net's spatial axis that becomes each of ours; None: the opposite order.
    """
    stages = [int(match[1]) for name in state if (match := _STAGE.match(name))]
    last, weights, unknown = max(stages, default=0) - 1, dict[str, Tensor](), list[str]()
    for name, value in state.items():
        place = _place(name, last)
        if place is None:
            unknown.append(name)
        elif place:
            dims = value.ndim - 2
            turned = [2 + axis for axis in axes or range(dims)[::-1]] if dims > 0 else []
            weights[place] = (value.permute(0, 1, *turned) if turned else value).float().contiguous()
    for stage in range(last + 1):  # of coarse and skip, where ours takes skip and coarse
        if (first := f"decoder.{stage}.0.weight") in weights:
            weights[first] = torch.cat(weights[first].chunk(2, 1)[::-1], 1)
    return weights, unknown


def _place(name: str, last: int) -> str | None:
    """Our name; empty: ours needs none of it; None: not a tensor of such networks.

    Args: last: the finest stage of the decoder, of which the coarsest is 0.
    """
    if _UNUSED.fullmatch(name):
        return ""
    if match := _CONV.fullmatch(name):
        side, stage, number, layer, part = match.groups()
        ours = "0.0" if stage is None else stage if side == "encoder" else last - int(stage)
        return f"{side}.{ours}.{3 * int(number) + (layer == 'norm')}.{part}"
    if match := _BLOCK.fullmatch(name):
        stage, block, inside, number, layer, part = match.groups()
        # three modules for each of two convolutions; in a skip averaging comes before the projection
        place = f"convs.{3 * (int(number) - 1)}" if inside == "conv" else f"skip.{number}"
        inner, _, first = place.partition(".")
        after_stem = int(block) + (stage == "0")
        return f"encoder.{stage}.{after_stem}.{inner}.{int(first) + (layer == 'norm')}.{part}"
    if match := _UP.fullmatch(name):
        return f"up.{last - int(match[1])}.{match[2]}"
    match = _HEAD.fullmatch(name)
    return match and (f"head.{match[2]}" if int(match[1]) == last else "")
