"""`medconv-train`, `python train.py`: compose a config with Hydra and train; a sweep runs every job as its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from medconv import commands, composing, config, run
from medconv.runfolder import RunFolder, is_rank_zero, short_hash

# What launchers leave behind, which would make a sweep's next job believe that it is a rank of the last one.
_LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def main() -> None:
    sys.exit(commands.guard(_main))


def _main() -> int:
    commands.start_logging(is_rank_zero())
    jobs: list[Job] = []

    def collect(composed: DictConfig, settings: Any) -> None:
        jobs.append(Job(composed, settings))
        jobs[-1].run()

    composing.composed(collect)
    if jobs and jobs[0].in_sweep:
        return _sweep_table(jobs)
    if jobs and jobs[0].error is not None:
        raise jobs[0].error
    return commands.DONE


class Job:
    """One composed config: trained in this process, or, in a sweep, in a fresh one of its own.

    A fresh process is what lets a job use several devices (Lightning starts their processes from the command line) and
    leaves the rest of a sweep alone when a job fails.
    """

    def __init__(self, composed: DictConfig, settings: Any) -> None:
        self.config, self.settings = composed, settings
        self.in_sweep = settings.mode == RunMode.MULTIRUN
        self.error: BaseException | None = None
        self.code = commands.DONE
        self.overrides = [str(o) for o in settings.overrides.task]
        self.folder: RunFolder | None = None

    def run(self) -> None:
        try:
            if self.in_sweep:
                self._run_apart()
            else:
                self._run_here()
        except BaseException as error:  # kept for `guard`: Hydra would print it in its own way
            self.error, self.code = error, commands.BUG

    def _run_here(self) -> None:
        checked = config.checked(self.config)
        folder = RunFolder.of(checked, dict(self.settings.runtime.choices))
        summary = run.train(checked, folder)
        if is_rank_zero():
            print(result_table(summary, folder))

    def _run_apart(self) -> None:
        folder = sweep_folder(self.config) / short_hash(sorted(self.overrides))
        self.folder = RunFolder(folder)
        sources = [s.path for s in self.settings.runtime.config_sources if s.provider == "command-line"]
        flags = [flag for path in sources for flag in ("--config-dir", path)]
        command = [sys.executable, "-m", "medconv.train", *flags, *self.overrides, f"run.dir={folder}"]
        print(f"\n{' '.join(self.overrides)}", flush=True)
        clean = {k: v for k, v in os.environ.items() if k not in _LAUNCHED}
        self.code = subprocess.run(command, env=clean, check=False).returncode
        if self.code == commands.INTERRUPTED:
            raise KeyboardInterrupt


def sweep_folder(composed: DictConfig) -> Path:
    """`run.dir`, `runs/<run.name>`, or a name that the same command line finds again."""
    if composed.run.dir:
        return Path(composed.run.dir)
    arguments = sorted(a for a in sys.argv[1:] if not a.startswith("-"))
    return Path("runs") / (composed.run.name or f"sweep-{short_hash(arguments)}")


def result_table(summary: dict[str, Any], folder: RunFolder) -> str:
    """Dice per class of the best checkpoint, and where everything is."""
    per_class = summary.get("val/dice_per_class") or {}
    rows = [(name, _dice(value)) for name, value in per_class.items()]
    rows += [("mean foreground", _dice(summary.get("val/dice")))] if per_class else []
    width = max([len(name) for name, _ in rows], default=0)
    table = [f"  {name:<{width}}  {value}" for name, value in rows]
    best = folder.best if folder.best.is_file() else folder.last
    return "\n".join(
        [
            "",
            f"Dice over {len(summary['val/cases'])} validation cases, best checkpoint" if rows else "no validation",
            *table,
            "",
            f"{summary.get('steps')} steps in {summary.get('wall_seconds')} s, "
            f"{summary.get('samples_per_second') or 0:.1f} samples/s, "
            f"{100 * (summary.get('data_wait_share') or 0):.1f} % of the time waiting for data",
            *([f"{summary['verdict']}"] if summary.get("verdict") else []),
            f"checkpoint  {best}",
            f"summary     {folder.path / 'summary.json'}",
            f"TensorBoard tensorboard --logdir {folder.path}",
        ]
    )


def _sweep_table(jobs: list[Job]) -> int:
    """Best first; a job that failed is named with its exit code and fails the sweep once all others have run."""
    results = [(job.folder.summary().get("val/dice"), job) for job in jobs if job.folder is not None]
    results.sort(key=lambda item: -1 if item[0] is None else item[0], reverse=True)
    print("\nsweep, best first")
    for value, job in results:
        state = "" if job.code == commands.DONE else f"  failed with exit code {job.code}"
        print(f"  {_dice(value)}  {job.folder.path}  {' '.join(job.overrides)}{state}")  # type: ignore[union-attr]
    failed = [job for job in jobs if job.code != commands.DONE]
    for job in failed:
        if job.error is not None:
            raise job.error
    return max((job.code for job in failed), default=commands.DONE)


def _dice(value: float | None) -> str:
    return "  -   " if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
