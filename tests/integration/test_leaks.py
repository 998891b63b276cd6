"""Long runs: resident memory, open files and processes stay what they were after the first epochs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import ranks, tiny
from lightning import Callback

from medconv.utils.exit_codes import DONE

BEGIN = 50  # epochs until libraries have grown their caches


class Resources(Callback):
    """Writes after each epoch what the main process and its loader workers hold. Args: path: of a file, a
    row per epoch.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.checkpoint_io.wait()  # a checkpoint that is being written is an open file
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        row = {
            "epoch": trainer.current_epoch + 1,
            "files": _files("self"),
            "kB": _resident("self"),
            "workers": len(children),
            "workers_files": sum(_files(child) for child in children),
            "workers_kB": sum(_resident(child) for child in children),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _files(process):
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def _resident(process):
    """kB that are the process's own: pages of files that it looks at come and go."""
    fields = dict(
        line.split(":")
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("Rss")
    )
    return int(fields["RssAnon"].split()[0])


def rows(folder, epochs, *more):
    """A 2D run of so many epochs of two steps with all that a run has: what it held after each."""
    dataset = tiny.write_dataset(folder / "data" / "tiny", shape=(16, 20, 1))
    settings = [
        f"trainer.max_epochs={epochs}",
        "schedule.patch=whole",  # growing patches take more memory later on
        "trainer.max_steps=-1",
        "data.samples_per_epoch=4",
        "data.num_workers=1",
        "+callbacks.resources._target_=tests.integration.test_leaks.Resources",
        f"+callbacks.resources.path={folder / 'rows'}",
        *more,
    ]
    arguments = [*tiny.overrides(dataset, *settings), f"run.dir={folder / 'run'}"]
    ended = ranks.run(*arguments, cwd=folder, number=1, timeout=1800)
    assert ended.codes == [DONE], ended.stderr
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


def grown(epochs, key, begin):
    """From the median of ten epochs that end at `begin` to that of the last ten."""
    middle = [
        sorted(row[key] for row in part)[len(part) // 2]
        for part in (epochs[begin - 10 : begin], epochs[-10:])
    ]
    return middle[1] - middle[0]


def test_files_and_processes_stay_over_a_short_run(tmp_path):
    """Workers that are started anew in each epoch, which leave most behind."""
    epochs = rows(tmp_path, 6, "data.persistent_workers=false")
    for key in ("files", "workers"):
        counts = [row[key] for row in epochs]
        assert max(counts[2:]) == counts[2], (key, counts)  # fewer may be left, once a thread has ended


@pytest.mark.slow
def test_500_epochs_hold_what_50_held(tmp_path):
    epochs = rows(tmp_path, 500)
    figures = {key: (epochs[BEGIN - 1][key], epochs[-1][key]) for key in epochs[0]}
    print(figures)
    assert len(epochs) == 500
    for key in ("files", "workers", "workers_files"):
        assert grown(epochs, key, BEGIN) == 0, figures
    assert grown(epochs, "kB", BEGIN) < 8000, figures
    assert grown(epochs, "workers_kB", BEGIN) < 8000, figures
