"""Our own preparation, loader and augmentation, by the line protocol of `serving`: built from a config, as
for training.

    PYTHONPATH=scripts python -m benchmarks.peers.medconv_data --mode loader --raw DATASET --scratch FOLDER
    ...

`prepare`: what `train.py` does before its first step: check, fingerprint, plan, store. `loader`: the
DataModule's training loader with one worker, in which the augmentation runs. `transforms`: the augmentation
of a batch in memory; with `--device cuda` on the device, its transfer not counted, as it happens with or
without augmentation.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers import serving


def main() -> None:
    serving.one_thread()
    options = serving.parse(__doc__)
    channel = serving.own_stdout()
    import torch

    import medconv

    torch.set_num_threads(1)
    name = f"medconv {medconv.__version__}"
    if options.mode == "prepare":
        from medconv.training import data_setup  # noqa: F401 - before the clock runs

        serving.serve(channel, name, lambda: _prepare_anew(options))
        return
    data = data_module(options, options.scratch / "medconv")
    serving.pin(options.core)
    if options.mode == "loader":
        batches = iter(data.train_dataloader())
        serving.serve(channel, name, serving.pulling(batches, lambda batch: len(batch["image"])))
    else:
        work = _transforming(data, options)
        serving.serve(channel, name, work, work.fresh)


def composed(options: argparse.Namespace, cache: Path) -> Any:
    """The config of a training on this dataset."""
    from hydra import compose, initialize_config_dir

    from medconv import config

    by_key = {
        "data.root": f"'{options.raw}'",
        "data.cache_dir": f"'{cache}'",
        "data.patch_size": list(options.patch),
        "data.spacing_mm": list(options.spacing),
        "data.batch_size": options.batch,
        "data.oversample_foreground": serving.FOREGROUND_SHARE,
        "data.samples_per_epoch": 10**6,
        "data.num_workers": 1 if options.mode == "loader" else 0,  # none works on while a transform is timed
        "data.prepare_workers": options.workers,
        "data.fold": "all",
        "trainer.accelerator": "cpu",
    }
    overrides = [
        "data=nnunet",
        f"augmentation={options.augment}",
        *(f"{key}={value}" for key, value in by_key.items()),
    ]
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return config.validate(compose("train", overrides))


def data_module(options: argparse.Namespace, cache: Path) -> Any:
    """The DataModule of that training; prepares the dataset if necessary."""
    from medconv import config
    from medconv.training.data_setup import build_data, prepare_data

    settings = composed(options, cache)
    prepared = prepare_data(settings)
    return build_data(config.with_derived(settings, prepared.derived), prepared)


def _prepare_anew(options: argparse.Namespace) -> int:
    from medconv.training.data_setup import prepare_data

    options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        return len(prepare_data(composed(options, Path(folder))).dataset.cases)


class _Untouched:
    """In place of an augmentation: returns batches unchanged."""

    def __init__(self, augment: Any) -> None:
        self._augment = augment

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._augment, name)


def _transforming(data: Any, options: argparse.Namespace) -> serving.Transforming:
    import torch

    augment = data.samples.augment
    untouched: Any = _Untouched(augment)
    if options.device == "cuda":  # as in training: the boxes that an augmentation on the device gets
        untouched.read_size = lambda sample: augment.max_read_size
    data.samples = replace(data.samples, augment=untouched)
    batches = iter(data.train_dataloader())

    def draw() -> dict[str, Any]:
        batch = data.transfer_batch_to_device(next(batches), torch.device(options.device), 0)
        _wait(options.device)
        return batch

    def transform(batch: dict[str, Any]) -> None:
        augment(batch)
        _wait(options.device)

    return serving.Transforming(draw, transform, samples=options.batch)


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
