"""Our own training command, as a contestant of the recipe benchmark (see `training`).

    PYTHONPATH=scripts python -m benchmarks.peers.medconv_train PART JOB

`train` is `python train.py` with its own defaults, `trainer.max_time` and the job's settings, which are
overrides. A callback keeps the weights. Its validations, one every 1000 samples and one at the end, count as
training, as they always do under `max_time`. The last weights are scored, not the best ones, which would be
chosen on the cases that they are scored on. `predict` is `medconv predict`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.peers import training

if TYPE_CHECKING:
    from medconv.data.case import Case


def prepare(job: training.Job) -> None:
    _command("preprocess", *_data(job), *job.settings)


def train(job: training.Job) -> None:
    path = Path(job.folder) / "snapshots.json"
    job.write(path)
    _command(
        "train",
        *_data(job),
        "trainer.accelerator=cpu",
        f"seed={job.seed}",
        *job.settings,
        f"trainer.max_time={duration(job.seconds)}",
        f"run.dir='{job.folder}/run'",
        "run.resume=never",
        "+callbacks.weights._target_=benchmarks.peers.weights.Weights",
        f"+callbacks.weights.job='{path}'",
    )


def predict(job: training.Job) -> None:
    from medconv.data.datasets.dataset_json import auto

    cases = {case.id: case for case in auto(job.root).cases}
    for file, folder, ids in training.missing(job):
        with TemporaryDirectory() as images:
            for case in ids:
                _link(cases[case], Path(images))
            options = [
                "--checkpoint",
                str(file),
                "--input",
                images,
                "--output",
                str(folder),
                "--device",
                "cpu",
            ]
            _command("predict", *options)


def duration(seconds: float) -> str:
    """As `trainer.max_time` is written."""
    minutes, rest = divmod(round(seconds), 60)
    return f"00:{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def _data(job: training.Job) -> list[str]:
    return [
        "data=auto",
        f"data.root='{job.root}'",
        f"data.cache_dir='{job.prepared}'",
        f"data.splits_file='{job.splits}'",
    ]


def _link(case: Case, folder: Path) -> None:
    """Link the images under the names by which the command recognises cases and channels."""
    from medconv.data.io.images import stem

    for channel, image in enumerate(case.images):
        ending = image.name.removeprefix(stem(image))
        number = f"_{channel:04d}" if len(case.images) > 1 else ""
        (folder / f"{case.id}{number}{ending}").symlink_to(image.resolve())


def _command(name: str, *arguments: str) -> None:
    """Ends this process with the command's exit code if it fails; its output has been shown."""
    code = subprocess.run([sys.executable, "-m", "medconv.cli", name, *arguments], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    training.main(__doc__, prepare=prepare, train=train, predict=predict)
