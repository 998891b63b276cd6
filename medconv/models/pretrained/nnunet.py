"""Networks of nnU-Net v2: their plans as arguments of our U-Net, their weights by our names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medconv.utils.logging import some

_PLACE = "dynamic_network_architectures.architectures.unet."
_PLAIN, _RESIDUAL = _PLACE + "PlainConvUNet", _PLACE + "ResidualEncoderUNet"
_ACTIVATIONS = ("torch.nn.LeakyReLU", "torch.nn.modules.activation.LeakyReLU")
# the same tensors under second names, and heads that only training uses
_UNUSED = ("decoder.encoder.", "decoder.seg_layers.")
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


def unet_weights(state: Mapping[str, Tensor], network: NnUNet, axes: Axes) -> dict[str, Tensor]:
    """The weights by the names of `UNet(strided=True)`.

    A bias before an instance norm has no effect, so our convolutions have none.
    Args: axes: nnU-Net's spatial axis that becomes each of ours.
    Raises: ValueError: a tensor is missing, or one is there that this network has not.
    """
    known, weights = set[str](), dict[str, Tensor]()

    def take(theirs: str, ours: str, parts: Sequence[str] = ("weight", "bias")) -> None:
        for part in parts:
            known.add(name := f"{theirs}.{part}")
            if name not in state:
                raise ValueError(f"{name} is missing in it; a trainer of another network?")
            value = state[name]
            spatial = value.ndim - 2 == len(axes)
            weights[f"{ours}.{part}"] = (
                value.permute(0, 1, *(2 + axis for axis in axes)) if spatial else value
            )

    def take_conv(theirs: str, ours: str, number: int) -> None:
        """A convolution and its norm."""
        take(f"{theirs}.conv", f"{ours}.{number}", ("weight",))
        take(f"{theirs}.norm", f"{ours}.{number + 1}")
        known.update(f"{theirs}.{name}" for name in ("conv.bias", *_TWICE))

    def take_block(theirs: str, ours: str, convs: int) -> None:
        for number in range(convs):
            take_conv(f"{theirs}.convs.{number}", ours, 3 * number)

    def take_residual(theirs: str, ours: str) -> None:
        take_conv(f"{theirs}.conv1", f"{ours}.convs", 0)
        take_conv(f"{theirs}.conv2", f"{ours}.convs", 3)
        for place in (0, 1):  # of the projection; averaging comes before it
            if f"{theirs}.skip.{place}.conv.weight" in state:
                take_conv(f"{theirs}.skip.{place}", f"{ours}.skip", place)

    last = len(network.channels) - 2
    if network.residual:
        take_block("encoder.stem", "encoder.0.0", 1)
    for stage, convs in enumerate(network.convs):
        if not network.residual:
            take_block(f"encoder.stages.{stage}.0", f"encoder.{stage}", convs)
            continue
        for number in range(convs):
            place = f"encoder.{stage}.{number + (stage == 0)}"  # after the stem
            take_residual(f"encoder.stages.{stage}.blocks.{number}", place)
    for number, convs in enumerate(network.decoder_convs):
        stage = last - number
        take(f"decoder.transpconvs.{number}", f"up.{stage}")
        take_block(f"decoder.stages.{number}", f"decoder.{stage}", convs)
        first = weights[f"decoder.{stage}.0.weight"]  # of coarse and skip, where ours takes skip and coarse
        weights[f"decoder.{stage}.0.weight"] = torch.cat(first.chunk(2, 1)[::-1], 1)
    take(f"decoder.seg_layers.{last}", "head")
    if unknown := [name for name in state if name not in known and not name.startswith(_UNUSED)]:
        raise ValueError(f"it holds {some(unknown, 3)}, which this network has not")
    return {name: value.float().contiguous() for name, value in weights.items()}


_TWICE = tuple(f"all_modules.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias"))
