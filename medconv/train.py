"""Compose a config with Hydra and train; `-m` makes a sweep of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from medconv import commands, composing, config, goals, run, scoring, sweep
from medconv.jobs import Job, note_failure
from medconv.runfolder import RunFolder, is_rank_zero


def run_command(arguments: Sequence[str]) -> int:
    """`medconv train` with these arguments. Returns: the exit code."""
    commands.start_logging(is_rank_zero())
    jobs: list[Job] = []
    launcher: dict[str, Any] = {}
    errors: list[BaseException] = []

    def take(composed: DictConfig, settings: Any) -> None:
        if settings.mode == RunMode.MULTIRUN:
            jobs.append(Job.of(composed, settings))  # to be run once all are known to compose
            launcher.update(OmegaConf.to_container(settings.launcher, resolve=True), dry_run=composed.run.dry_run)  # type: ignore[arg-type]
            return
        try:
            _train(composed, settings)
        except BaseException as error:
            note_failure(composed, error)
            errors.append(error)  # for `guard`: Hydra would print it in its own way

    composing.composed(take, arguments)
    for error in errors:
        raise error
    if jobs:
        sweep.need_alone()
    if jobs and launcher["dry_run"]:
        print(sweep.plan(jobs, launcher))
    elif jobs:
        sweep.run(jobs, launcher)
        return sweep.finish(jobs)
    return commands.DONE


def _train(composed: DictConfig, settings: Any) -> None:
    checked = config.checked(composed)
    folder = RunFolder.of(checked, dict(settings.runtime.choices))
    if checked.run.dry_run:
        print(f"# {folder.path}\n{OmegaConf.to_yaml(composed)}", end="")
        return
    summary = run.train(checked, folder)
    if is_rank_zero():
        print(result_table(summary, folder))


def result_table(summary: dict[str, Any], folder: RunFolder) -> str:
    """The scores of the best checkpoint, of segmentation per class, and where everything is."""
    per_class, goal = summary.get("val/dice_per_class") or {}, goals.of_summary(summary)
    rows = [(name, _score(value)) for name, value in per_class.items()]
    rows += [("mean foreground", _score(summary.get("val/dice")))] if per_class else []
    if goal != goals.DICE:
        names = [name for kind in scoring.METRICS.values() for name in kind if f"val/{name}" in summary]
        rows = [(name.replace("_", " "), _score(summary[f"val/{name}"])) for name in dict.fromkeys(names)]
    what = "Dice" if goal == goals.DICE else "scores"
    width = max([len(name) for name, _ in rows], default=0)
    table = [f"  {name:<{width}}  {value}" for name, value in rows]
    best = folder.best if folder.best.is_file() else folder.last
    return "\n".join(
        [
            "",
            f"{what} over {len(summary['val/cases'])} validation cases, best checkpoint" if rows else "no validation",
            *table,
            "",
            f"{summary.get('steps')} steps in {summary.get('wall_seconds')} s, "
            f"{summary.get('samples_per_second') or 0:.1f} samples/s, "
            f"{100 * (summary.get('data_wait_share') or 0):.1f} % of the time waiting for data",
            *([f"{summary['verdict']}"] if summary.get("verdict") else []),
            *([f"stopped early: {summary['stopped_early']['reason']}"] if summary.get("stopped_early") else []),
            f"checkpoint  {best}",
            f"summary     {folder.path / 'summary.json'}",
            f"TensorBoard tensorboard --logdir {folder.path}",
        ]
    )


def _score(value: float | None) -> str:
    return "  -   " if value is None else f"{value:.4f}"

