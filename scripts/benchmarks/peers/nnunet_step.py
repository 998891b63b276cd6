"""nnU-Net's own training step, taken when a line on standard input says so.

This script and its neighbour `serving.py` stand alone: they are run by the python of an environment that has
nnU-Net, which need not have medconv.

    python3 -m venv FOLDER && FOLDER/bin/pip install nnunetv2==2.8.1
    FOLDER/bin/python scripts/benchmarks/peers/nnunet_step.py --patch 40 56 40 --batch 2 --threads 2

The protocol, one line each: it says {"ready": true, "name": ..., "parameters": ..., "precision": ...,
"torch": ..., "threads": ..., "compiled": ...} once; every "step" is answered by {"seconds": ..., "loss":
...}; "quit" or the end of the input ends it. All that nnU-Net prints goes to standard error.

Network, loss, optimizer, clipping, autocast and compilation are what `nnUNetTrainer` takes by default on that
device, the network's sizes those of the options. Loading and augmentation are left out: every step sees the
same random batch.
Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; https://github.com/MIC-DKFZ/nnUNet, version
2.8.1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if __package__:
    from benchmarks.peers.serving import need, own_stdout, say
else:  # a script, run where medconv is not installed
    from serving import need, own_stdout, say  # type: ignore[no-redef]
if TYPE_CHECKING:
    from torch import Tensor

DATASET, CONFIGURATION = "Dataset001_Random", "fullres"


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that all peers share."""
    step_parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    step_parser.add_argument(
        "--patch", type=int, nargs="+", default=[40, 56, 40], help="voxels per axis, two axes or three"
    )
    step_parser.add_argument("--batch", type=int, default=2)
    step_parser.add_argument(
        "--features", type=int, nargs="+", default=[32, 64, 128, 256], help="channels per stage"
    )
    step_parser.add_argument("--classes", type=int, default=3, help="background is one of them")
    step_parser.add_argument("--channels", type=int, default=1, help="of the image")
    step_parser.add_argument(
        "--threads", type=int, help="of torch; the peer's own default where it is not given"
    )
    step_parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return step_parser


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with code 2 and a message where the patch does not fit the stages."""
    parsed = options.parse_args(argv)
    divisor = 2 ** (len(parsed.features) - 1)
    if len(parsed.patch) not in (2, 3) or any(size < 1 or size % divisor for size in parsed.patch):
        options.error(
            f"--patch needs 2 or 3 sizes that {divisor} divides, for {len(parsed.features)} stages, got "
            f"{parsed.patch}"
        )
    return parsed


def random_batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The same for every peer: image (batch, channels, *spatial) float32, labels (batch, 1, *spatial)
    int16.
    """
    import torch

    dice = torch.Generator().manual_seed(0)
    image = torch.randn(options.batch, options.channels, *options.patch, generator=dice)
    labels = torch.randint(
        options.classes, (options.batch, 1, *options.patch), generator=dice, dtype=torch.int16
    )
    return image, labels


def main() -> None:
    options = parse(parser(__doc__))
    need("nnunetv2", "nnU-Net", "nnunetv2==2.8.1")
    channel = own_stdout()
    with tempfile.TemporaryDirectory() as folder:
        _set_environment(Path(folder))
        _set_torch(options)
        trainer = _trainer(options)
        say(channel, ready=True, **_about(trainer))
        _serve(channel, trainer, _batch(trainer, options))


def _set_environment(folder: Path) -> None:
    """Its folders are temporary; what else its variables would change (compilation, logging) stays as by
    default.
    """
    for name in [name for name in os.environ if name.startswith("nnUNet")]:
        del os.environ[name]
    for kind in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{kind}"] = str(folder / kind)
    cases = folder / "preprocessed" / DATASET / CONFIGURATION
    cases.mkdir(parents=True)
    (cases / "none.b2nd").touch()  # it infers from the ending how to load


def _set_torch(options: argparse.Namespace) -> None:
    """As `nnUNetv2_train` does, but for a given number of threads."""
    import torch

    if options.device == "cuda":
        torch.set_num_interop_threads(1)
        torch.backends.cudnn.benchmark = True
    torch.set_num_threads(options.threads or (1 if options.device == "cuda" else multiprocessing.cpu_count()))
    torch.manual_seed(0)


def _trainer(options: argparse.Namespace) -> Any:
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    description = {
        "labels": {"background": 0, **{f"class {i}": i for i in range(1, options.classes)}},
        "channel_names": {str(i): f"channel {i}" for i in range(options.channels)},
        "file_ending": ".nii.gz",
        "numTraining": 1,
    }
    trainer = nnUNetTrainer(_plans(options), CONFIGURATION, 0, description, torch.device(options.device))
    trainer.initialize()
    trainer.on_train_epoch_start()
    return trainer


def _plans(options: argparse.Namespace) -> dict[str, Any]:
    """What its planner would write for one configuration at full resolution."""
    configuration = {
        "data_identifier": CONFIGURATION,
        "batch_size": options.batch,
        "patch_size": options.patch,
        "batch_dice": len(options.patch) == 2,
        "architecture": _architecture(options.features, len(options.patch)),
    }
    return {
        "dataset_name": DATASET,
        "plans_name": "nnUNetPlans",
        "label_manager": "LabelManager",
        "continue_training": False,
        "configurations": {CONFIGURATION: configuration},
    }


def _architecture(features: Sequence[int], dims: int) -> dict[str, Any]:
    stages = len(features)
    arguments = {
        "n_stages": stages,
        "features_per_stage": features,
        "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
        "kernel_sizes": [[3] * dims] * stages,
        "strides": [[1] * dims] + [[2] * dims] * (stages - 1),
        "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def _batch(trainer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """As its loader gives it: the labels once per output of deep supervision, finest first; pinned for
    CUDA.
    """
    import torch
    from batchgeneratorsv2.transforms.utils.deep_supervision_downsampling import DownsampleSegForDSTransform

    image, labels = random_batch(options)
    coarser = DownsampleSegForDSTransform(trainer._get_deep_supervision_scales())
    samples = [coarser(segmentation=sample)["segmentation"] for sample in labels]
    targets = [torch.stack(of_scale) for of_scale in zip(*samples, strict=True)]
    if options.device == "cuda":
        image, targets = image.pin_memory(), [target.pin_memory() for target in targets]
    return {"data": image, "target": targets}


def _about(trainer: Any) -> dict[str, Any]:
    import torch

    return {
        "name": f"nnU-Net {metadata.version('nnunetv2')}",
        "parameters": sum(weight.numel() for weight in trainer.network.parameters()),
        "precision": "float16 autocast" if trainer.device.type == "cuda" else "float32",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compiled": isinstance(trainer.network, torch._dynamo.OptimizedModule),
    }


def _serve(channel: TextIO, trainer: Any, batch: dict[str, Any]) -> None:
    import torch

    wait = torch.cuda.synchronize if trainer.device.type == "cuda" else (lambda: None)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        wait()
        start = time.perf_counter()
        loss = trainer.train_step(batch)["loss"]
        wait()
        say(channel, seconds=time.perf_counter() - start, loss=float(loss))


if __name__ == "__main__":
    main()
