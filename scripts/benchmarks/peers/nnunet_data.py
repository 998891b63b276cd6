"""nnU-Net's own preprocessing, loader and training transforms, by the line protocol of `serving`.

This script and its neighbour `serving.py` stand alone: they are run by the python of an environment that has
nnU-Net, which need not have medconv.

    python3 -m venv FOLDER && FOLDER/bin/pip install nnunetv2==2.8.1

`prepare`: its fingerprint, its plan and its preprocessing of the full resolution, as
`nnUNetv2_plan_and_preprocess -c 3d_fullres` does; patch and target spacing are the options'. `loader`: what
`nnUNetTrainer.get_dataloaders` gives with one augmentation process (nnUNet_n_proc_DA=1): blosc2 files,
patches enlarged for rotation, `NonDetMultiThreadedAugmenter`. `transforms`: what
`nnUNetTrainer.get_training_transforms` gives, on such enlarged patches. Deep supervision is off, so that
labels are not scaled down in addition. `--labels nearest` replaces the one-hot linear resampling of labels.
Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; https://github.com/MIC-DKFZ/nnUNet, version
2.8.1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

if __package__:
    from benchmarks.peers import serving
else:  # a script, run where medconv is not installed
    import serving  # type: ignore[no-redef]

CONFIGURATION, PLANS = "3d_fullres", "nnUNetPlans"


def main() -> None:
    serving.one_thread()
    options = serving.parse(__doc__)
    serving.need("nnunetv2", "nnU-Net", "nnunetv2==2.8.1")
    channel = serving.own_stdout()
    name = f"nnU-Net {metadata.version('nnunetv2')}"
    if options.mode == "prepare":
        from nnunetv2.experiment_planning import plan_and_preprocess_api  # noqa: F401 - before the clock runs

        details: dict[str, float] = {}
        serving.serve(channel, name, lambda: _prepare_anew(options, details), parts=details)
        return
    home = options.scratch / "nnunet"
    _set_environment(options, home)
    if not (home / "done").is_file():
        prepare(options, home)
        (home / "done").touch()
    serving.pin(options.core)
    trainer = _trainer(options, home)
    if options.mode == "loader":
        loaders = trainer.get_dataloaders()
        serving.serve(channel, name, serving.pulling(loaders[0], lambda batch: len(batch["data"])))
        for loader in loaders:
            loader._finish()  # else its processes keep this one from ending
    else:
        work = _transforming(trainer)
        serving.serve(channel, name, work, work.fresh)


def prepare(options: argparse.Namespace, home: Path) -> dict[str, float]:
    """Returns: seconds of its three parts."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api

    number = int(options.raw.name[len("Dataset") :][:3])
    start = time.perf_counter()
    api.extract_fingerprint_dataset(
        number, num_processes=options.workers, verbose=False, show_progress_bar=False
    )
    fingerprint = time.perf_counter()
    api.plan_experiment_dataset(number, overwrite_target_spacing=options.spacing[::-1])
    _set_patch(options, home / options.raw.name / f"{PLANS}.json")
    plan = time.perf_counter()
    api.preprocess_dataset(number, PLANS, (CONFIGURATION,), (options.workers,), show_progress_bar=False)
    done = time.perf_counter()
    return {"fingerprint": fingerprint - start, "plan": plan - fingerprint, "preprocess": done - plan}


def _prepare_anew(options: argparse.Namespace, details: dict[str, float]) -> int:
    options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        _set_environment(options, Path(folder))
        details.update(prepare(options, Path(folder)))
    return len(serving.files(options.raw))


def _set_environment(options: argparse.Namespace, home: Path) -> None:
    """Its folders, which its modules look up at each use; what else its variables would change stays as by
    default.
    """
    for name in [name for name in os.environ if name.startswith("nnUNet")]:
        del os.environ[name]
    for kind, folder in {
        "raw": options.raw.parent,
        "preprocessed": home,
        "results": home / "results",
    }.items():
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[f"nnUNet_{kind}"] = str(folder)
    os.environ["nnUNet_n_proc_DA"] = "1"  # noqa: SIM112 - its spelling


def _set_patch(options: argparse.Namespace, path: Path) -> None:
    """It counts axes from the last of the file's, then in an order of its own."""
    plans = json.loads(path.read_text())
    reverse = options.patch[::-1]
    settings = plans["configurations"][CONFIGURATION]
    settings["patch_size"] = [reverse[axis] for axis in plans["transpose_forward"]]
    settings["batch_size"] = options.batch
    path.write_text(json.dumps(plans))


def _trainer(options: argparse.Namespace, home: Path) -> Any:
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    class Nearest(nnUNetTrainer):
        @staticmethod
        def get_training_transforms(*args: Any, **settings: Any) -> Any:
            transforms = nnUNetTrainer.get_training_transforms(*args, **settings)
            transforms.transforms[0].mode_seg = "nearest"
            return transforms

    torch.set_num_threads(1)
    folder = home / options.raw.name
    plans, description = (
        json.loads((folder / name).read_text()) for name in (f"{PLANS}.json", "dataset.json")
    )
    shutil.rmtree(home / "results", ignore_errors=True)
    kind = Nearest if options.labels == "nearest" else nnUNetTrainer
    plans["continue_training"] = False
    trainer = kind(plans, CONFIGURATION, "all", description, torch.device("cpu"))
    trainer.enable_deep_supervision, trainer.batch_size = False, options.batch
    return trainer


def _transforming(trainer: Any) -> serving.Transforming:
    from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader
    from nnunetv2.training.dataloading.nnunet_dataset import infer_dataset_class

    patch = trainer.configuration_manager.patch_size
    rotation, flat, initial, mirrored = trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size()
    transform = trainer.get_training_transforms(
        patch, rotation, None, mirrored, flat, foreground_labels=[1, 2]
    )
    cases = infer_dataset_class(trainer.preprocessed_dataset_folder)(trainer.preprocessed_dataset_folder)
    loader = nnUNetDataLoader(
        cases,
        1,
        initial,
        patch,
        trainer.label_manager,
        serving.FOREGROUND_SHARE,
        probabilistic_oversampling=True,
    )

    def draw() -> dict[str, Any]:
        batch = next(loader)
        return {"image": batch["data"][0], "segmentation": batch["target"][0]}

    return serving.Transforming(draw, lambda patch: transform(**patch))


if __name__ == "__main__":
    main()
