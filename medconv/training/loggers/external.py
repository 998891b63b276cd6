"""`logger=wandb` and `logger=mlflow`: optional packages, which write to the disk by default.

Each start of a run is a separate run there, named after its folder. Images go to TensorBoard only.
"""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

_FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"  # recent versions need it to write files


def wandb(save_dir: str, project: str = "medconv", offline: bool = True, **more: Any) -> WandbLogger:
    """Weights & Biases, in the run's folder; `wandb sync FOLDER/wandb/offline-run-*` uploads it.

    Raises: ValueError: its package is not installed.
    """
    settings = _needed("wandb", "wandb").Settings(silent=True)
    name = Path(save_dir).resolve().name
    return WandbLogger(
        save_dir=save_dir, project=project, name=name, group=name, offline=offline, settings=settings, **more
    )


def mlflow(
    save_dir: str, experiment: str = "medconv", tracking_uri: str | None = None, tags: Sequence[str] = ()
) -> MLFlowLogger:
    """MLflow, by default in a folder `mlruns` beside the run's folder, so that runs can be compared.

    Args: tracking_uri: of a server or a database instead. tags: each becomes a tag of the value true.
    Raises: ValueError: its package is not installed.
    """
    if tracking_uri is None:
        os.environ.setdefault(_FILES_ALLOWED, "true")
        tracking_uri = (Path(save_dir).resolve().parent / "mlruns").as_uri()
    _needed("mlflow", "mlflow")
    name, known = Path(save_dir).resolve().name, dict.fromkeys(tags, "true")
    return _Dotted(experiment, run_name=name, tracking_uri=tracking_uri, tags=known)


class _Dotted(MLFlowLogger):
    """Logs `val.dice` and `val.dice.liver`: in MLflow, `val/dice` cannot be both a value and a folder."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name.replace("/", "."): value for name, value in metrics.items()}, step)


def _needed(package: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"logger={extra} needs the package {package}: pip install 'medconv[{extra}]'"
        ) from error
