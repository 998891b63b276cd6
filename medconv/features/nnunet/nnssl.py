"""What a checkpoint of nnssl says of its network and preprocessing: its `nnssl_adaptation_plan`.

Source: https://github.com/MIC-DKFZ/nnssl, adaptation_planning/adaptation_plan.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medconv.features.nnunet.network import NnUNet
from medconv.features.nnunet.plans import DAMAGED, axes_of, normalisations
from medconv.utils import checkpoint_io
from medconv.utils.errors import explained

_KEY = "nnssl_adaptation_plan"
_PARTS = {"architecture_plans", "pretrain_plan"}  # plans before these had no arguments of the network
_STAGES = 6
# ResEnc L of Wald et al. 2024, arXiv:2410.23132
_RES_ENC_L: dict[str, Any] = {
    "n_stages": _STAGES,
    "features_per_stage": [32, 64, 128, 256, 320, 320],
    "kernel_sizes": [[3, 3, 3]] * _STAGES,
    "strides": [[1, 1, 1], *[[2, 2, 2]] * (_STAGES - 1)],
    "n_blocks_per_stage": [1, 3, 4, 6, 6, 6],
    "n_conv_per_stage_decoder": [1] * (_STAGES - 1),
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "nonlin": "torch.nn.LeakyReLU",
}
# Without skips it has the same encoder, which is what pretraining leaves.
_PRESETS = {"ResEncL": _RES_ENC_L, "NoSkipResEncL": _RES_ENC_L}
_PACKAGE = "dynamic_network_architectures.architectures.unet."
_CLASSES = ("ResidualEncoderUNet", "PlainConvUNet")


@dataclass(frozen=True)
class NnsslPlan:
    """A pretrained network of nnssl, in its axes.

    Args:
        architecture: its name for the network.
        dataset: that it was pretrained on.
        network: with the decoder that it is meant for.
        axes: its spatial axis that becomes each of ours.
        spacing_mm: None: images were not resampled.
        normalisation: of each channel.
    """

    architecture: str
    dataset: str
    network: NnUNet
    axes: tuple[int, ...]
    spacing_mm: tuple[float, ...] | None
    normalisation: tuple[str, ...]


def read(path: Path) -> NnsslPlan | None:
    """The plan in a checkpoint; None: it has none, or one of an early version, which says too little.

    Raises:
        ValueError: the file cannot be read, or its plan is damaged or for a network that medconv has not.
    """
    content = checkpoint_io.unpickled(path, inert=True)
    plan = content.get(_KEY) if isinstance(content, Mapping) else None
    if not isinstance(plan, Mapping) or not set(plan) >= _PARTS:
        return None
    with explained(f"{path}: its {_KEY} is damaged", *DAMAGED), explained(f"{path}", ValueError):
        return _parsed(plan["architecture_plans"], plan["pretrain_plan"])


def _parsed(architecture: Mapping[str, Any], pretraining: Mapping[str, Any]) -> NnsslPlan:
    # it holds the one configuration that was used
    configuration = next(iter(pretraining["configurations"].values()))
    spacing_mm = configuration.get("spacing")
    return NnsslPlan(
        architecture=str(architecture["arch_class_name"]),
        dataset=str(pretraining.get("dataset_name")),
        network=_network(architecture),
        axes=axes_of(pretraining, dims=3),
        spacing_mm=None if spacing_mm is None else tuple(map(float, spacing_mm)),
        normalisation=normalisations(configuration),
    )


def _network(architecture: Mapping[str, Any]) -> NnUNet:
    """Raises: ValueError: a network that our U-Net cannot be."""
    name = architecture["arch_class_name"]
    arguments = _PRESETS.get(name)
    class_name = _CLASSES[0]
    if name in _CLASSES:
        class_name = name
        # nnssl counts convolutions of plain networks under the same name as blocks of residual ones
        given = architecture["arch_kwargs"]
        arguments = {"n_conv_per_stage": given.get("n_blocks_per_stage"), **given}
    if arguments is None:
        raise ValueError(
            f"arch_class_name={name} is not supported, expected {', '.join((*_PRESETS, *_CLASSES))}"
        )
    network = {"network_class_name": _PACKAGE + class_name, "arch_kwargs": arguments}
    return NnUNet.of({"architecture": network})
