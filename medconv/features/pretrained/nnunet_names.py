"""Weights of nnU-Net v2's networks by the names of our U-Net, and ours by nnU-Net's.

Source: names of https://github.com/MIC-DKFZ/dynamic-network-architectures.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_LAYER = r"\.(conv|norm)\.(weight|bias|running_mean|running_var|num_batches_tracked)"
_STAGE = re.compile(r"encoder\.stages\.(\d+)\.")
_CONV = re.compile(r"(encoder|decoder)\.(?:stem|stages\.(\d+))(?:\.0)?\.convs\.(\d+)" + _LAYER)
_BLOCK = re.compile(r"encoder\.stages\.(\d+)\.blocks\.(\d+)\.(conv|skip\.)(\d)" + _LAYER)
_UP = re.compile(r"decoder\.transpconvs\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"decoder\.seg_layers\.(\d+)\.(weight|bias)")  # all but the finest serve training alone
# biases before a norm, and second names of the same tensors
_UNUSED = re.compile(r".*\.conv\.bias|.*\.all_modules\.\d+\.\w+|decoder\.encoder\..*")
_MODULES_PER_CONV = 3  # in our blocks: convolution, norm, activation
Axes = Sequence[int]


def by_our_names(tensors: Mapping[str, Tensor], axes: Axes | None) -> dict[str, Tensor]:
    """A file's tensors; those of a network of nnU-Net or nnssl, under whatever prefix, as `unet_weights`."""
    prefix = _network_prefix(tensors)
    if prefix is None:
        return dict(tensors)
    state = {name.removeprefix(prefix): value for name, value in tensors.items()}
    weights, unknown = unet_weights(state, axes)
    # The unknown ones stay under their names, to be reported as not used.
    return {**weights, **{name: state[name] for name in unknown}}


def with_our_axes(tensors: Mapping[str, Tensor], axes: Axes | None) -> dict[str, Tensor]:
    """The tensors of nnU-Net's network by its own names. Args: axes: as of `unet_weights`."""
    turned = {}
    for name, value in tensors.items():
        is_kernel = value.ndim > 2 and any(pattern.search(name) for pattern in (_CONV, _BLOCK, _UP, _HEAD))
        turned[name] = _with_our_axes(value, axes) if is_kernel else value
    return turned


def has_nnunet_names(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the tensors are, under whatever prefix, those of a network of nnU-Net or nnssl."""
    return _network_prefix(tensors) is not None


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

    A bias before an instance norm has no effect, so our convolutions have none; before a batch norm it shifts
    the running mean.

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
    for name in state:
        our_name = _our_name(name, finest)
        if our_name is None:
            unknown.append(name)
        elif our_name:
            unbiased = _without_bias(name, state)
            weights[our_name] = _with_our_axes(unbiased, axes).float().contiguous()
    for stage in range(finest + 1):  # of coarse and skip, where ours takes skip and coarse
        first_conv = f"decoder.{stage}.0.weight"
        if first_conv in weights:
            weights[first_conv] = _swapped_inputs(weights[first_conv])
    return weights, unknown


def _without_bias(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """A tensor of a layer as it is where the convolution has no bias."""
    bias = state.get(name.replace(".norm.running_mean", ".conv.bias"))
    if bias is None or not name.endswith(".norm.running_mean"):
        return state[name]
    return state[name] - bias


def _swapped_inputs(kernel: Tensor) -> Tensor:
    """The kernel of a decoder's first convolution, which takes skip and coarse in the other order."""
    return torch.cat(kernel.chunk(2, 1)[::-1], 1)


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
    """Our name of a convolution of the stem, or of a stage of plain convolutions."""
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
    """Our name of a convolution in a residual block of the encoder, or of its skip."""
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


def nnunet_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """nnU-Net's state dict from that of a `UNet(strided=True)`; the opposite of `unet_weights`.

    What ours lacks is 0: biases before norms, and the heads of coarser stages, which serve training alone.

    Shape:
        kernels (out, in, *spatial) -> (out, in, *spatial in the opposite order).
    """
    finest = max(int(name.split(".")[1]) for name in weights if name.startswith("decoder."))
    state: dict[str, Tensor] = {}
    for our_name, value in weights.items():
        kernel = _with_our_axes(value, None)
        if re.fullmatch(r"decoder\.\d+\.0\.weight", our_name):
            kernel = _swapped_inputs(kernel)
        name = _nnunet_name(our_name, finest, is_kernel=value.ndim > 1)
        state[name] = kernel.contiguous()
        if name.endswith(".conv.weight") and ".skip." not in name:
            state[name.replace(".weight", ".bias")] = value.new_zeros(len(value))
    state |= _coarser_heads(weights, state, finest)
    state |= _second_names(state)
    encoder = {name: value for name, value in state.items() if name.startswith("encoder.")}
    return state | {f"decoder.{name}": value for name, value in encoder.items()}


def _coarser_heads(
    weights: Mapping[str, Tensor], state: Mapping[str, Tensor], finest: int
) -> dict[str, Tensor]:
    """Args: weights: ours. state: nnU-Net's."""
    head = weights["head.weight"]
    heads = {}
    for stage in range(finest):
        # A transposed convolution's kernel is (in, out, *spatial).
        channels = state[f"decoder.transpconvs.{stage}.weight"].shape[1]
        heads[f"decoder.seg_layers.{stage}.weight"] = head.new_zeros(len(head), channels, *head.shape[2:])
        heads[f"decoder.seg_layers.{stage}.bias"] = head.new_zeros(len(head))
    return heads


def _second_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """nnU-Net's blocks keep their layers in a list, too."""
    second_names = {}
    for name, value in state.items():
        for number, layer in enumerate((".conv.", ".norm.")):
            if layer in name:
                second_names[name.replace(layer, f".all_modules.{number}.")] = value
    return second_names


def _nnunet_name(name: str, finest: int, is_kernel: bool) -> str:
    """nnU-Net's name of a tensor of ours; the opposite of `_our_name`.

    Our convolutions before norms have kernels alone.
    """
    part, *inner, parameter = name.split(".")
    if part == "head":
        return f"decoder.seg_layers.{finest}.{parameter}"
    stage, *inner = inner
    if part == "up":
        return f"decoder.transpconvs.{finest - int(stage)}.{parameter}"
    layer = f"conv.{parameter}" if is_kernel else f"norm.{parameter}"
    module = int(inner.pop())
    conv = module // _MODULES_PER_CONV
    if part == "decoder":
        return f"decoder.stages.{finest - int(stage)}.convs.{conv}.{layer}"
    if not inner:
        return f"encoder.stages.{stage}.0.convs.{conv}.{layer}"
    if len(inner) == 1:
        return f"encoder.stem.convs.{conv}.{layer}"
    block, branch = inner
    nnunet_block = f"encoder.stages.{stage}.blocks.{int(block) - (stage == '0')}"
    if branch == "convs":
        return f"{nnunet_block}.conv{conv + 1}.{layer}"
    return f"{nnunet_block}.skip.{module if is_kernel else module - 1}.{layer}"
