"""MONAI's DynUNet in a plain Lightning loop, a step taken when a line on standard input says so.

    PYTHONPATH=scripts python -m benchmarks.peers.dynunet --patch 40 56 40 --batch 2 --threads 2

The protocol is that of `benchmarks.peers.nnunet_step`. A step's seconds are those of one whole turn of
Lightning's
loop: fetching the batch (always the same), forward, MONAI's DiceCELoss, backward and AdamW's update. Logger,
checkpoints, progress bar and clipping are off, as is deep supervision.
Source: https://docs.monai.io/en/1.6.1/networks.html#dynunet
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, TextIO

import lightning as L
import monai
import torch
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.nnunet_step import parse, parser, random_batch
from benchmarks.peers.serving import own_stdout, say


class Plain(L.LightningModule):
    """A plain module: a network, a loss and an optimizer; between steps it waits for the next line."""

    def __init__(self, network: torch.nn.Module, channel: TextIO) -> None:
        super().__init__()
        self.network, self.channel = network, channel
        self.criterion = DiceCELoss(to_onehot_y=True, softmax=True)
        self.last: Tensor | None = None
        self.start = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, labels = batch
        loss = self.criterion(self.network(image), labels)
        self.last = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """From one call to the next is one turn of the loop. Returns: -1,
        which ends the epoch, if no step is requested.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.last is not None:
            say(self.channel, seconds=time.perf_counter() - self.start, loss=self.last.item())
        if sys.stdin.readline().strip() != "step":
            return -1
        self.start = time.perf_counter()
        return None


class Same(Dataset[Any]):
    """The same batch in every step."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batch


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--precision", default="32-true", help="as Lightning names it")
    chosen = parse(options)
    channel = own_stdout()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    network = build(chosen)
    trainer = _trainer(chosen)
    say(channel, ready=True, **_about(network, chosen))
    image, labels = random_batch(chosen)
    trainer.fit(Plain(network, channel), DataLoader(Same((image, labels)), batch_size=None))


def build(options: argparse.Namespace) -> DynUNet:
    """With the same convolutions as nnU-Net's PlainConvUNet of these features."""
    steps = len(options.features) - 1
    return DynUNet(
        spatial_dims=len(options.patch),
        in_channels=options.channels,
        out_channels=options.classes,
        kernel_size=[3] * (steps + 1),
        strides=[1] + [2] * steps,
        upsample_kernel_size=[2] * steps,
        filters=options.features,
    )


def _trainer(options: argparse.Namespace) -> L.Trainer:
    return L.Trainer(
        accelerator=options.device,
        devices=1,
        precision=options.precision,
        max_epochs=1,
        benchmark=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _about(network: DynUNet, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": f"MONAI {monai.__version__} DynUNet, Lightning {L.__version__}",
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "precision": options.precision,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compiled": False,
    }


if __name__ == "__main__":
    main()
