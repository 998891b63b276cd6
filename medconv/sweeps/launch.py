"""The work of `medconv train`: compose a config with Hydra, then one run, or with `-m` a sweep."""

from collections.abc import Sequence
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from medconv import config
from medconv.config import compose
from medconv.sweeps import run as sweeps_run
from medconv.sweeps.job import Job, note_failure
from medconv.sweeps.table import score_text
from medconv.targets import Targets
from medconv.training import run
from medconv.training.run_dir import RunDir, is_rank_zero
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging


def train(arguments: Sequence[str]) -> int:
    """`medconv train` with these arguments. Returns: the exit code."""
    start_logging(is_rank_zero())
    jobs: list[Job] = []
    launcher: dict[str, Any] = {}
    errors: list[BaseException] = []

    def launch(composed: DictConfig, settings: Any) -> None:
        if settings.mode == RunMode.MULTIRUN:
            # Started once all of them have composed.
            jobs.append(Job.of(composed, settings))
            options: Any = OmegaConf.to_container(settings.launcher, resolve=True)
            launcher.update(options, dry_run=composed.run.dry_run)
            return
        try:
            _train(composed, settings)
        except BaseException as error:
            note_failure(composed, error)
            # For `guard`: Hydra would print it differently.
            errors.append(error)

    compose.run_with_config(launch, arguments)
    # At most one: a single run.
    for error in errors:
        raise error
    return _run_sweep(jobs, launcher) if jobs else DONE


def _run_sweep(jobs: Sequence[Job], launcher: dict[str, Any]) -> int:
    sweeps_run.check_no_launcher()
    if launcher["dry_run"]:
        print(sweeps_run.plan(jobs, launcher))
        return DONE
    sweeps_run.run(jobs, launcher)
    return sweeps_run.finish(jobs)


def _train(composed: DictConfig, settings: Any) -> None:
    checked = config.validate(composed)
    folder = RunDir.of(checked, dict(settings.runtime.choices))
    if checked.run.dry_run:
        print(f"# {folder.path}\n{OmegaConf.to_yaml(composed)}", end="")
        return
    summary = run.train(checked, folder)
    if is_rank_zero():
        print(result_table(summary, folder))


def result_table(summary: dict[str, Any], folder: RunDir) -> str:
    """Scores of the best checkpoint (for segmentation per class), and where everything is."""
    lines = ["", *_score_lines(summary), *_caution(summary), "", _speed_line(summary)]
    if summary.get("verdict"):
        lines.append(summary["verdict"])
    if summary.get("stopped_early"):
        lines.append(f"stopped early: {summary['stopped_early']['reason']}")
    lines.append(f"checkpoint  {folder.trained}")
    lines.append(f"summary     {folder.path / 'summary.json'}")
    if (folder.path / "tensorboard").is_dir():
        lines.append(f"TensorBoard tensorboard --logdir {folder.path}")
    return "\n".join(lines)


def _score_lines(summary: dict[str, Any]) -> list[str]:
    targets = Targets.from_plain(summary["targets"])
    rows = targets.score_table(summary)
    if not rows:
        return ["no validation"]
    width = max(len(name) for name, _ in rows)
    case_count = len(summary["val/cases"])
    lines = [f"{targets.score_title} over {case_count} validation cases, best checkpoint"]
    for name, score in rows:
        lines.append(f"  {name:<{width}}  {score_text(score)}")
    return lines


def _caution(summary: dict[str, Any]) -> list[str]:
    """What speaks against the scores."""
    warning = summary.get("split_warning")
    return [f"caution: {warning}"] if warning else []


def _speed_line(summary: dict[str, Any]) -> str:
    speed = summary.get("samples_per_second") or 0
    data_wait_percent = 100 * (summary.get("data_wait_share") or 0)
    return (
        f"{summary.get('steps')} steps in {summary.get('wall_seconds')} s, {speed:.1f} samples/s, "
        f"{data_wait_percent:.1f} % of the time waiting for data"
    )
