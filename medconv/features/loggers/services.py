"""`logger=wandb` and `logger=mlflow`: optional packages, which write to the disk by default.

Each start of a run is a separate run there, named after its folder. Images go to TensorBoard only.
"""

import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

_UNFIT = re.compile(r"[^\w./: -]")
# Environment variable; recent versions of MLflow need it to write files.
_FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"


def wandb(save_dir: str, project: str = "medconv", offline: bool = True, **options: Any) -> WandbLogger:
    """Weights & Biases, in the run's folder; `wandb sync FOLDER/wandb/offline-run-*` uploads it.

    Args:
        save_dir: the run's folder, after which the run is named.
        project: of Weights & Biases.
        offline: writes to the disk only.
        options: of Lightning's logger.
    Raises:
        ValueError: its package is not installed.
    """
    package = _import("wandb", extra="wandb")
    run_name = Path(save_dir).resolve().name
    return WandbLogger(
        save_dir=save_dir,
        project=project,
        name=run_name,
        group=run_name,
        offline=offline,
        settings=package.Settings(silent=True),
        **options,
    )


def mlflow(
    save_dir: str, experiment: str = "medconv", tracking_uri: str | None = None, tags: Sequence[str] = ()
) -> MLFlowLogger:
    """MLflow, by default in a folder `mlruns` beside the run's folder, so that runs can be compared.

    Args:
        save_dir: the run's folder, after which the run is named.
        experiment: of MLflow.
        tracking_uri: of a server or a database instead.
        tags: each becomes a tag of the value true.
    Raises:
        ValueError: its package is not installed.
    """
    folder = Path(save_dir).resolve()
    if tracking_uri is None:
        os.environ.setdefault(_FILES_ALLOWED, "true")
        tracking_uri = (folder.parent / "mlruns").as_uri()
    _import("mlflow", extra="mlflow")
    return _Dotted(
        experiment, run_name=folder.name, tracking_uri=tracking_uri, tags=dict.fromkeys(tags, "true")
    )


class _Dotted(MLFlowLogger):
    """Logs `val.dice` and `val.dice.liver`: in MLflow, `val/dice` cannot be both a value and a folder.

    Parameters have names of letters, digits and `_-./: ` there, which patterns of cases are not.
    """

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        fitting = {_UNFIT.sub("_", name): value for name, value in dict(params).items()}
        super().log_hyperparams(fitting, *args, **kwargs)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        dotted = {name.replace("/", "."): value for name, value in metrics.items()}
        super().log_metrics(dotted, step)


def _import(package: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"logger={extra} needs the package {package}: pip install 'medconv[{extra}]'"
        ) from error
