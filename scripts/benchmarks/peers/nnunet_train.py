"""nnU-Net trained for a given time on a CPU, as a contestant of the recipe benchmark (see `training`).

This script and its neighbours `training.py` and `serving.py` stand alone: they are run by the python of an
environment that has nnU-Net, which need not have medconv.

    python3 -m venv FOLDER && FOLDER/bin/pip install nnunetv2==2.8.1

The job's one setting is the class of nnU-Net's planners: `ExperimentPlanner` or `nnUNetPlannerResEncM`. Plan,
preprocessing, batch and patch, loader, augmentation, network, loss with deep supervision, SGD and clipping
are its own, 3D at full resolution. What is different from `nnUNetv2_train` is in its favour or follows from
the budget:
- Its learning rate falls as (1 - share)^0.9 of its 1000 epochs; here it is the share of the budget, in every
  iteration.
- It would compute 50 validation batches, a picture and checkpoints after each 250 iterations. It trains on
  instead: its final weights do not depend on them.
- Starting its loader's processes does not count.
Prediction is that of `nnUNetTrainer.perform_actual_validation`: half overlapping windows, mirrored along all
axes, its own export.
Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; Isensee et al. 2024, arXiv:2404.09556 (ResEnc);
https://github.com/MIC-DKFZ/nnUNet, version 2.8.1.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

if __package__:
    from benchmarks.peers import serving, training
else:  # a script, run where medconv is not installed
    import serving  # type: ignore[no-redef]
    import training  # type: ignore[no-redef]

CONFIGURATION = "3d_fullres"


def prepare(job: training.Job) -> None:
    """Its fingerprint, plan and preprocessing, and the split that all contestants have."""
    done = Path(job.prepared) / "done"
    _set_environment(job)
    if not done.is_file():
        from nnunetv2.experiment_planning import plan_and_preprocess_api as api

        number, workers = int(Path(job.raw).name[len("Dataset") :][:3]), len(os.sched_getaffinity(0))
        api.extract_fingerprint_dataset(number, num_processes=workers, verbose=False, show_progress_bar=False)
        plans = api.plan_experiments([number], job.settings[0])
        api.preprocess_dataset(number, plans, (CONFIGURATION,), (workers,), show_progress_bar=False)
        done.write_text(plans)
    shutil.copyfile(job.splits, Path(job.prepared) / Path(job.raw).name / "splits_final.json")


def train(job: training.Job) -> None:
    """From its first iteration until none fits into the budget any more."""
    import numpy as np
    import torch

    trainer = _trainer(job)
    torch.manual_seed(job.seed)
    np.random.seed(job.seed)  # its loader's seeds are drawn by it
    trainer.on_train_start()
    trainer.network.train()
    trainer.lr_scheduler.max_steps = 1.0  # so that a step of the schedule is a share of the budget
    clock = training.Clock(job.seconds)
    snapshots, steps = training.Snapshots(job, clock), 0

    def save(path: Path) -> None:
        torch.save(
            {"weights": trainer.network.state_dict(), "mirror": trainer.inference_allowed_mirroring_axes},
            path,
        )

    clock.start()
    while clock.fits():
        trainer.lr_scheduler.step(clock.share)
        trainer.train_step(next(trainer.dataloader_train))
        steps += 1
        snapshots.after_step(steps, save)
    snapshots.finish(steps, save, **_about(trainer))
    for loader in (trainer.dataloader_train, trainer.dataloader_val):
        if hasattr(loader, "_finish"):
            loader._finish()  # else its processes keep this one from ending


def predict(job: training.Job) -> None:
    import torch
    from nnunetv2.inference.export_prediction import export_prediction_from_logits
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    trainer = _trainer(job)
    trainer.set_deep_supervision_enabled(False)
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    plans, configuration = trainer.plans_manager, trainer.configuration_manager
    for file, folder, cases in training.missing(job):
        content = torch.load(file, weights_only=True)
        trainer.network.load_state_dict(content["weights"])
        predictor.manual_initialization(
            trainer.network,
            plans,
            configuration,
            None,
            trainer.dataset_json,
            "nnUNetTrainer",
            content["mirror"],
        )
        data = trainer.dataset_class(trainer.preprocessed_dataset_folder, cases)
        for case in cases:
            image, _, _, properties = data.load_case(case)
            logits = predictor.predict_sliding_window_return_logits(torch.from_numpy(image[:]))
            partial = folder / f".{case}"
            export_prediction_from_logits(
                logits, properties, configuration, plans, trainer.dataset_json, str(partial)
            )
            partial.with_name(f".{case}.nii.gz").replace(folder / f"{case}.nii.gz")


def _set_environment(job: training.Job) -> None:
    """Its folders, which its modules look up at each use; what else its variables would change stays as by
    default.
    """
    serving.need("nnunetv2", "nnU-Net", "nnunetv2==2.8.1")
    for name in [name for name in os.environ if name.startswith("nnUNet")]:
        del os.environ[name]
    folders = {
        "raw": str(Path(job.raw).parent),
        "preprocessed": job.prepared,
        "results": f"{job.folder}/results",
    }
    for kind, folder in folders.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.environ[f"nnUNet_{kind}"] = folder
    os.environ["nnUNet_n_proc_DA"] = str(len(os.sched_getaffinity(0)))  # noqa: SIM112 - its spelling


def _trainer(job: training.Job) -> Any:
    """nnU-Net's own, built as `nnUNetv2_train DATASET 3d_fullres 0 -device cpu -p PLANS` does."""
    _set_environment(job)
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    folder, plans_name = Path(job.prepared) / Path(job.raw).name, (Path(job.prepared) / "done").read_text()
    plans, description = (
        json.loads((folder / name).read_text()) for name in (f"{plans_name}.json", "dataset.json")
    )
    plans["continue_training"] = False
    trainer = nnUNetTrainer(plans, CONFIGURATION, 0, description, torch.device("cpu"))
    trainer.initialize()
    return trainer


def _about(trainer: Any) -> dict[str, Any]:
    import torch

    configuration = trainer.configuration_manager
    return {
        "name": f"nnU-Net {metadata.version('nnunetv2')}, {trainer.plans_manager.plans_name}",
        "parameters": sum(weight.numel() for weight in trainer.network.parameters()),
        "patch_size": [int(n) for n in configuration.patch_size],
        "batch_size": int(trainer.batch_size),
        "precision": "float32",
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    training.main(__doc__, prepare=prepare, train=train, predict=predict)
