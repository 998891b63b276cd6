"""`test=true`: after the training, the dataset's test cases are scored with the best checkpoint."""

import logging

import lightning as L

from medconv.config import ConfigError
from medconv.data.loading.datamodule import DataModule
from medconv.training.data_setup import PreparedData
from medconv.training.run_dir import RunDir
from medconv.training.task import Task

log = logging.getLogger(__name__)


def check_has_test_cases(prepared: PreparedData) -> None:
    """Raises: ConfigError: the dataset names no test cases."""
    if not prepared.test:
        raise ConfigError(
            f"test=true: {prepared.dataset.name} names no test cases, as MedMNIST and a table's `split` "
            "do; other images are scored by medconv predict and medconv evaluate"
        )


def already_scored(folder: RunDir) -> bool:
    """Whether an earlier start of the run has scored its test cases."""
    return "test/cases" in folder.summary()


def score(trainer: L.Trainer, task: Task, data: DataModule, folder: RunDir) -> None:
    """Writes `test/cases` and the scores over them to `summary.json`; all ranks take their share of cases."""
    checkpoint = folder.best if folder.best.is_file() else folder.last
    trainer.test(task, datamodule=data, ckpt_path=str(checkpoint), weights_only=True, verbose=False)
    scores = task.targets.summary(task.rows)
    values = {f"test/{name}": value for name, value in scores.items()}
    folder.write_summary(**values, **{"test/cases": task.rows})
    # Per-class scores are lists or dictionaries; the log shows the means alone
    means = [f"{name} {value:.4f}" for name, value in scores.items() if isinstance(value, float)]
    log.info("test: %d cases, %s: %s", len(task.rows), checkpoint.name, ", ".join(means))
