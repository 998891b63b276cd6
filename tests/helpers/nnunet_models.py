"""Model folders as nnU-Net v2 leaves them, made by hand from seeds, and nnU-Net's own predictions.

This file needs neither medconv nor, but for `predicted`, nnunetv2. `python nnunet_models.py FILE` in an
environment with nnunetv2 2.8.1 writes what the tests compare with.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np
import torch

CHANNELS = (4, 8, 8)
_KERNELS: dict[str, Any] = {
    "turned": [[3, 3, 3]] * 3,
    "thick": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "residual": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
}
_STRIDES: dict[str, Any] = {
    "turned": [[1, 1, 1], [2, 2, 2], [2, 1, 2]],
    "thick": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
    "residual": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}
_BLOCKS = (1, 2, 1)  # of the residual encoder
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # stored axes in another order than the network's, a border of zeros, finer voxels
    "turned": {"spacing": [1.0, 0.8, 1.1], "patch_size": [12, 8, 12], "use_mask_for_norm": [True]},
    # slices of 5 mm, two channels, a margin beyond the patch along one axis
    "thick": {"spacing": [4.0, 1.0, 1.0], "patch_size": [4, 12, 12], "use_mask_for_norm": [False, False]},
    # slices one by one, plans as before nnU-Net 2.4
    "slices": {"spacing": [1.0, 1.1], "patch_size": [12, 8], "use_mask_for_norm": [False]},
    # the encoder of nnU-Net's ResEnc plans
    "residual": {"spacing": [2.0, 1.0, 1.0], "patch_size": [8, 12, 8], "use_mask_for_norm": [False]},
}
_IMAGES: dict[str, tuple[tuple[int, ...], tuple[float, ...], str]] = {  # shape, spacing, axes
    "turned": ((14, 17, 11), (0.9, 1.2, 0.7), "PIR"),
    "thick": ((15, 13, 6), (1.2, 1.3, 5.0), "LPS"),
    "slices": ((15, 9, 4), (1.0, 1.2, 3.0), "LAS"),
    "residual": ((13, 9, 8), (1.0, 1.1, 2.0), "RAS"),
}
NAMES = tuple(_IMAGES)
MIRRORED: dict[str, tuple[int, ...] | None] = {
    "turned": (0, 2),
    "thick": None,
    "slices": (0, 1),
    "residual": (1,),
}


def write_model(folder: Path, name: str) -> Path:
    """The folder of one trained configuration, fold 0."""
    (folder / "fold_0").mkdir(parents=True)
    dataset = dataset_json(name)
    spacing = _IMAGES[name][1][::-1]
    fingerprint = {"spacings": [spacing, spacing, [2 * mm for mm in spacing]]}
    contents = {"dataset": dataset, "plans": plans(name), "dataset_fingerprint": fingerprint}
    for file, content in contents.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    content = {
        "network_weights": state_dict(name, len(dataset["channel_names"])),
        "init_args": {"configuration": name, "fold": 0, "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": MIRRORED[name],
        "logging": {"mean_fg_dice": [np.float32(0.5), np.float64(0.6)]},
    }
    torch.save(content, folder / "fold_0/checkpoint_final.pth")
    return folder


def write_nnssl(
    path: Path, architecture: dict[str, Any], weights: dict[str, torch.Tensor], **configuration: Any
) -> Path:
    """A pretrained checkpoint with its plan, as nnssl serializes it. Args: configuration: of the pretraining."""
    used = {
        "spacing_style": "onemmiso",
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "spacing": [1, 1.5, 2],
        "patch_size": [16, 16, 16],
        **configuration,
    }
    pretraining = {
        "dataset_name": "Dataset745_OpenMind",
        "transpose_forward": [0, 1, 2],
        "configurations": {"onemmiso": used},
    }
    plan = {
        "architecture_plans": {"arch_kwargs": None, "arch_kwargs_requiring_import": None, **architecture},
        "pretrain_plan": pretraining,
        "pretrain_num_input_channels": 1,
        "recommended_downstream_patchsize": [160, 160, 160],
        "key_to_encoder": "encoder.stages",
        "key_to_stem": "encoder.stem",
    }
    torch.save({"network_weights": weights, "nnssl_adaptation_plan": plan}, path)
    return path


def dataset_json(name: str) -> dict[str, Any]:
    return {
        "channel_names": {"0": "CT", "1": "MRI"} if name == "thick" else {"0": "MRI"},
        "labels": {"background": 0, "core": 1, "rim": 2},
        "numTraining": 3,
        "file_ending": ".nii.gz",
    }


def plans(name: str) -> dict[str, Any]:
    chosen = _CONFIGURATIONS[name]
    dims, resampling = len(chosen["spacing"]), {}
    for key, order, is_seg in (("data", 3, False), ("seg", 1, True), ("probabilities", 1, False)):
        kwargs = {"is_seg": is_seg, "order": order, "order_z": 0, "force_separate_z": None}
        resampling[f"resampling_fn_{key}"] = "resample_data_or_seg_to_shape"
        resampling[f"resampling_fn_{key}_kwargs"] = kwargs
    schemes = ["CTNormalization", "ZScoreNormalization"] if name == "thick" else ["ZScoreNormalization"]
    configuration = {
        "data_identifier": name,
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "median_image_size_in_voxels": chosen["patch_size"],
        "normalization_schemes": schemes,
        **resampling,
        **chosen,
        **(_old_architecture() if name == "slices" else {"architecture": _architecture(name, dims)}),
        "batch_dice": False,
    }
    numbers = {"max": 9.0, "mean": 0.5, "median": 0.4, "min": -9.0, "std": 1.5}
    limits = {"percentile_00_5": -1.5, "percentile_99_5": 2.0}
    order = [1, 2, 0] if name == "turned" else [0, 1, 2]
    return {
        "dataset_name": f"Dataset001_{name}",
        "plans_name": "nnUNetPlans",
        "original_median_shape_after_transp": [4, 12, 12],
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": order,
        "transpose_backward": [order.index(axis) for axis in range(3)],
        "configurations": {name: {"inherits_from": "base"}, "base": configuration},
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            str(channel): {**numbers, **limits} for channel in range(len(schemes))
        },
    }


def _architecture(name: str, dims: int) -> dict[str, Any]:
    settings = {
        "n_stages": 3,
        "features_per_stage": list(CHANNELS),
        "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
        "kernel_sizes": _KERNELS[name],
        "strides": _STRIDES[name],
        **({"n_blocks_per_stage": _BLOCKS} if name == "residual" else {"n_conv_per_stage": [2, 1, 2]}),
        "n_conv_per_stage_decoder": [1, 1 if name == "residual" else 2],
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    network = "ResidualEncoderUNet" if name == "residual" else "PlainConvUNet"
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{network}",
        "arch_kwargs": settings,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def _old_architecture() -> dict[str, Any]:
    return {
        "UNet_class_name": "PlainConvUNet",
        "UNet_base_num_features": 4,
        "unet_max_num_features": 8,
        "n_conv_per_stage_encoder": [2, 1, 2],
        "n_conv_per_stage_decoder": [1, 2],
        "num_pool_per_axis": [2, 1],
        "pool_op_kernel_sizes": [[1, 1], [2, 2], [2, 1]],
        "conv_kernel_sizes": [[3, 3]] * 3,
    }


def state_dict(name: str, in_channels: int) -> dict[str, torch.Tensor]:
    """Random weights under all names that nnU-Net saves, its second names included."""
    rng = torch.Generator().manual_seed(NAMES.index(name))
    kernels = _KERNELS.get(name, [[3, 3]] * 3)
    strides = _STRIDES.get(name, [[1, 1], [2, 2], [2, 1]])
    state: dict[str, torch.Tensor] = {}

    def conv(place: str, *shape: int) -> None:
        spread = (2 / max(1, int(np.prod(shape[1:])))) ** 0.5
        state[f"{place}.weight"] = torch.randn(shape, generator=rng) * spread
        out = shape[1] if "transpconvs" in place else shape[0]
        state[f"{place}.bias"] = torch.randn(out, generator=rng)

    def layer(place: str, into: int, out: int, kernel: list[int], bias: bool = True) -> None:
        conv(f"{place}.conv", out, into, *kernel)
        if not bias:
            del state[f"{place}.conv.bias"]
        state[f"{place}.norm.weight"] = 1 + 0.3 * torch.randn(out, generator=rng)
        state[f"{place}.norm.bias"] = 0.3 * torch.randn(out, generator=rng)
        for position, part in enumerate(("conv", "norm")):
            for end in ("weight", "bias")[: None if bias or position else 1]:
                state[f"{place}.all_modules.{position}.{end}"] = state[f"{place}.{part}.{end}"]

    def block(place: str, convs: int, into: int, out: int, kernel: list[int]) -> None:
        for number in range(convs):
            layer(f"{place}.convs.{number}", out if number else into, out, kernel)

    if name == "residual":
        block("encoder.stem", 1, in_channels, CHANNELS[0], kernels[0])
    for stage, into in enumerate((in_channels, *CHANNELS[:2])):
        out, kernel = CHANNELS[stage], kernels[stage]
        if name != "residual":
            block(f"encoder.stages.{stage}.0", (2, 1, 2)[stage], into, out, kernel)
            continue
        for number in range(_BLOCKS[stage]):
            place = f"encoder.stages.{stage}.blocks.{number}"
            layer(f"{place}.conv1", into if stage and not number else out, out, kernel)
            layer(f"{place}.conv2", out, out, kernel)
            if stage == 1 and not number:  # other channels; the averaging before it has no weights
                layer(f"{place}.skip.1", into, out, [1, 1, 1], bias=False)
    for place, value in list(state.items()):
        state[f"decoder.{place}"] = value
    for number in range(2):
        fine, coarse = CHANNELS[1 - number], CHANNELS[2 - number]
        conv(f"decoder.transpconvs.{number}", coarse, fine, *strides[2 - number])
        convs = 1 if name == "residual" else number + 1
        block(f"decoder.stages.{number}", convs, 2 * fine, fine, kernels[1 - number])
        head = f"decoder.seg_layers.{number}"
        conv(head, 3, fine, *[1] * len(kernels[0]))
        state[f"{head}.weight"] -= state[f"{head}.weight"].mean(
            1, keepdim=True
        )  # so that no class wins alone
        state[f"{head}.bias"] *= 0.1
    return state


def write_image(folder: Path, name: str, seed: int | None = None) -> list[Path]:
    """Smooth random files, one per channel, with a border of zeros. Args: seed: None: one for each name."""
    shape, spacing, axes = _IMAGES[name]
    rng = np.random.default_rng(NAMES.index(name) if seed is None else seed)
    files = []
    orientation = nib.orientations.axcodes2ornt(axes)
    turned = nib.orientations.inv_ornt_aff(orientation, shape)[:3, :3]
    affine = np.eye(4)
    affine[:3, :3] = turned * np.array(spacing)
    folder.mkdir(parents=True, exist_ok=True)
    for channel in range(2 if name == "thick" else 1):
        noise = rng.normal(size=shape)
        for axis in range(3):
            noise = (np.roll(noise, 1, axis) + 2 * noise + np.roll(noise, -1, axis)) / 2
        noise[:2], noise[:, -1:] = 0, 0
        path = folder / f"{name}_{channel:04d}.nii.gz"
        nib.save(nib.Nifti1Image(noise.astype(np.float32), affine), path)
        files.append(path)
    return files


def predicted(model: Path, images: list[Path], fold: str = "0") -> dict[str, np.ndarray]:
    """By nnU-Net: the prepared image, logits on its grid, both (channels, X, Y, Z), and the label map.

    The label map has the axes of the file.
    """
    from nnunetv2.inference.data_iterators import PreprocessAdapterFromNpy
    from nnunetv2.inference.export_prediction import (
        convert_predicted_logits_to_segmentation_with_correct_shape,
    )
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    settings = {"perform_everything_on_device": False, "device": torch.device("cpu"), "allow_tqdm": False}
    nnunet = nnUNetPredictor(**settings)
    nnunet.initialize_from_trained_model_folder(str(model), (fold,))
    plans, configuration = nnunet.plans_manager, nnunet.configuration_manager
    image, properties = plans.image_reader_writer_class().read_images(list(map(str, images)))
    given = ([image], [None], [properties], [None], plans, nnunet.dataset_json, configuration, 1)
    item = next(PreprocessAdapterFromNpy(*given))
    logits = nnunet.predict_logits_from_preprocessed_data(item["data"]).cpu()
    label = convert_predicted_logits_to_segmentation_with_correct_shape(
        logits, plans, configuration, nnunet.label_manager, item["data_properties"], num_threads_torch=1
    )
    back = [0, *(1 + axis for axis in plans.transpose_backward)]
    stored = {"image": np.asarray(item["data"]), "logits": logits.numpy()}
    turned = {key: value.transpose(back).transpose(0, 3, 2, 1) for key, value in stored.items()}
    # nnU-Net's array has the axes of its reader, which may have turned them; the file that it writes has the
    # image's.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "label.nii.gz"
        plans.image_reader_writer_class().write_seg(label, str(path), item["data_properties"])
        written: Any = nib.load(path)
        return {**turned, "label": np.asarray(written.dataobj).astype(label.dtype)}


def main(target: Path) -> None:
    folder, arrays = target.parent / "nnunet_models", []
    for name in NAMES:
        result = predicted(write_model(folder / name, name), write_image(folder / "images", name))
        arrays.append({f"{name}.{key}": value for key, value in result.items()})
        print(name, {key: value.shape for key, value in result.items()}, np.bincount(result["label"].ravel()))
    np.savez_compressed(target, **dict(chain.from_iterable(part.items() for part in arrays)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
