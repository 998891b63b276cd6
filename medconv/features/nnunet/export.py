"""A dataset folder of nnU-Net v2, which `nnUNetv2_predict` runs: plans.json, dataset.json and a checkpoint.

Only our U-Net in nnU-Net's shape (`model.strided=true`) computes what one of nnU-Net's networks computes.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medconv.data.left_right import left_right_axis
from medconv.features.export.job import Format, Job
from medconv.features.nnunet import export_plans
from medconv.features.nnunet.export_plans import Content
from medconv.features.nnunet.network import NnUNet
from medconv.features.pretrained.nnunet_names import nnunet_state, unet_weights
from medconv.inference.load import LoadedModel
from medconv.models.unet import UNet
from medconv.utils import checkpoint_io
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some

_DATASET_NAME = re.compile(r"Dataset\d{3}_\w.*")
_TRAINER = "nnUNetTrainer"
_CHECKPOINT = "checkpoint_final.pth"
_STEP_SIZE = 0.5  # nnU-Net's default: of the patch, from one window to the next


class NnUNetFolder(Format):
    """The format `nnunet` of `medconv export`."""

    is_folder = True

    def check(self, model: LoadedModel, output: Path) -> None:
        check_nnunet(model, output)

    def write(self, path: Path, job: Job) -> None:
        job.compare(write_nnunet(path, job.model, job.content, job.name), larger_patch(job.model))

    def notes(self, model: LoadedModel, output: Path) -> list[str]:
        return [f"{output}, a model of nnU-Net v2", *prediction_notes(model, output)]


NNUNET = NnUNetFolder()


def check_nnunet(model: LoadedModel, output: Path) -> None:
    """Check what can be checked before anything is written.

    Raises:
        ArgumentError: the folder has no name of an nnU-Net dataset.
        ValueError: nnU-Net has no such network, or cannot prepare images as it needs; says what would fit.
    """
    if not _DATASET_NAME.fullmatch(output.name):
        raise ArgumentError(
            "output",
            f" {output}: needs the name of an nnU-Net dataset, such as Dataset004_{model.targets.names[0]}",
        )
    export_plans.check_preprocessing(model)
    _check_network(model)


def _check_network(model: LoadedModel) -> None:
    network = model.network
    path = model.path
    expected = "PlainConvUNet (model=customconv) or ResidualEncoderUNet (model=resenc)"
    if type(network) is not UNet:
        raise ValueError(f"{path}: nnU-Net has no {type(network).__name__}, expected {expected}")
    if not network.strided:
        raise ValueError(
            f"{path}: its stages are joined by convolutions of their own, which nnU-Net's networks lack; "
            f"train with model.strided=true for {expected}"
        )
    plain = _layers(_plain_unet(network, model))
    layers = _layers(network)
    differing = [f"{name} {layer}" for name, layer in layers.items() if plain.get(name) != layer]
    if differing or plain.keys() != layers.keys():
        raise ValueError(
            f"{path}: its `conv` does not fold to the convolutions of nnU-Net ({some(differing, 2)}); "
            "conv=none or smooth does"
        )


def _plain_unet(network: UNet, model: LoadedModel) -> UNet:
    """The same U-Net with the convolutions of nnU-Net, on the device `meta`."""
    with torch.device("meta"):
        return UNet(
            spatial_dims=len(network.divisor),
            in_channels=len(model.modalities),
            out_channels=model.targets.num_outputs,
            channels=network.channels,
            strides=network.strides,
            kernel_size=network.kernel_sizes,
            convs_per_stage=network.convs_per_stage,
            norm=network.norm,
            residual_blocks=network.residual_blocks,
            strided=True,
        )


def _layers(network: nn.Module) -> dict[str, str]:
    """Layers that have no layers of their own, with their arguments, by name."""
    modules = network.named_modules()
    return {name: str(layer) for name, layer in modules if not any(True for _ in layer.children())}


def write_nnunet(
    folder: Path, model: LoadedModel, content: Mapping[str, Any], dataset_name: str
) -> nn.Module:
    """Write an nnU-Net model into a folder, and read its network back.

    Args:
        folder: of the dataset, which exists.
        model: a network that `check_nnunet` has passed.
        content: of its checkpoint.
    Returns:
        The network with the weights of the file.
    """
    network = model.network
    assert isinstance(network, UNet)
    configuration = export_plans.configuration_name(model)
    trained = folder / f"{_TRAINER}__{export_plans.PLANS_NAME}__{configuration}"
    file = trained / f"fold_{_fold(content)}" / _CHECKPOINT
    file.parent.mkdir(parents=True)
    plans = export_plans.plans(model, NnUNet.of_network(network), dataset_name)
    num_cases = content["medconv"]["config"]["derived"]["num_train_cases"]
    dataset = export_plans.dataset_json(model, dataset_name, num_cases)
    for name, values in (("plans.json", plans), ("dataset.json", dataset)):
        (trained / name).write_text(json.dumps(values, indent=4) + "\n", encoding="utf-8")
    with file.open("wb") as opened:
        checkpoint_io.save(_checkpoint(model, plans, dataset, configuration, _fold(content)), opened)
    return _read_network(file, network, model)


def _fold(content: Mapping[str, Any]) -> str:
    """The fold of the run: a number, or `all` if it trained on all cases."""
    return str(content["medconv"]["config"]["data"]["fold"])


def _checkpoint(
    model: LoadedModel, plans: Content, dataset: Content, configuration: str, fold: str
) -> Content:
    """As nnU-Net's trainer saves it; its optimizer is not ours."""
    return {
        "network_weights": nnunet_state(model.network.state_dict()),
        "optimizer_state": None,
        "grad_scaler_state": None,
        "logging": {},
        "_best_ema": None,
        "current_epoch": 0,
        "init_args": {
            "plans": plans,
            "configuration": configuration,
            "fold": int(fold) if fold.isdigit() else fold,
            "dataset_json": dataset,
        },
        "trainer_name": _TRAINER,
        "inference_allowed_mirroring_axes": mirrored_axes(model) or None,
    }


def mirrored_axes(model: LoadedModel) -> tuple[int, ...]:
    """nnU-Net's axes of test-time augmentation, without the one along which labels would have to swap."""
    window = model.window
    swapping_axis = left_right_axis(window.slice_axis) if window.flip_label_pairs else None
    last = model.preprocessing.spatial_dims - 1
    return tuple(sorted(last - axis for axis in window.mirror_axes if axis != swapping_axis))


def _read_network(file: Path, network: UNet, model: LoadedModel) -> nn.Module:
    weights, unknown = unet_weights(checkpoint_io.unpickled(file, inert=True)["network_weights"])
    assert not unknown, unknown
    read = _plain_unet(network, model).to_empty(device="cpu")
    read.load_state_dict(weights)
    return read.eval()


def larger_patch(model: LoadedModel) -> tuple[int, ...]:
    """Another size that the network takes."""
    assert isinstance(model.network, UNet)
    axes = zip(model.window.patch_size, model.network.divisor, strict=True)
    return tuple(size + divisor for size, divisor in axes)


def prediction_notes(model: LoadedModel, output: Path) -> list[str]:
    """How to run it, and where nnU-Net predicts otherwise than medconv."""
    (trained,) = output.glob(f"{_TRAINER}__*")
    fold = next(trained.glob("fold_*")).name.removeprefix("fold_")
    name, results = shlex.quote(output.name), shlex.quote(str(output.absolute().parent))
    command = f"nnUNetv2_predict -d {name} -c {export_plans.configuration_name(model)} -f {fold}"
    step_size = 1 - model.window.overlap
    if step_size != _STEP_SIZE:
        command += f" -step_size {step_size:g}"
    notes = [f"nnUNet_results={results} {command} -i IMAGES -o PREDICTIONS"]
    if len(mirrored_axes(model)) < len(model.window.mirror_axes):
        notes.append("nnU-Net cannot swap left and right labels: it does not mirror along that axis")
    return notes
