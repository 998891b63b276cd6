"""`medconv train`, `python train.py`: compose a config by Hydra and train; `-m` starts a sweep."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medconv import doors
from medconv.cli.parsers import Parser, add_package
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import score_text, start_logging

if TYPE_CHECKING:
    from medconv.training.run_dir import RunDir

_SWEEP = "sweep"  # the command that -m stands for
_HYDRA_FLAGS = """\
  -m, --multirun              sweep: one run for each combination of KEY=A,B
  --cfg job                   print every key and its value instead of training
  --config-dir DIR            a folder with your own options, DIR/GROUP/OPTION.yaml
  --config-name NAME          use another main config than train
  --hydra-help                Hydra's other flags"""


def parser() -> Parser:
    command = Parser(
        "train",
        "data=msd data.root=/data/Task04_Hippocampus",
        "Train a network; results are in runs/NAME/.\n"
        "If a run was stopped, the same command resumes it.\n"
        "A sweep: medconv train -m model=customconv,segresnet optimizer.lr=1e-3,3e-3\n"
        "`python train.py` in a checkout is the same as `medconv train`.",
        takes_overrides=True,
        hydra=_HYDRA_FLAGS,
    )
    add_package(command.general())
    return command


def run_command(options: argparse.Namespace) -> int:
    """Train, or only show what Hydra is asked for. Returns: the exit code."""
    began = time.monotonic()  # what is imported counts for the run
    from medconv.config import compose

    flags = compose.hydra_flags(options.overrides, "medconv train", options.package)
    if flags.only_shows:
        start_logging()
        from medconv.cli.show import show

        show(flags)
        return DONE
    from omegaconf import OmegaConf

    from medconv import config
    from medconv.utils import cluster

    start_logging(cluster.is_first())
    composer = compose.Composer(flags)
    if composer.is_sweep:
        commands = doors.mapping(doors.COMMANDS)
        if _SWEEP not in commands:
            raise ValueError("-m starts a sweep, which medconv/features/sweeps runs; it is not installed")
        return int(doors.load(commands[_SWEEP][1]).run_command(options))
    (composed,) = composer.configs()
    os.environ.update(composed.settings.job.env_set)  # variables that the user's own config sets
    run_config = config.validate(composed.values)
    # Not before: they load lightning and monai, which takes seconds, and a key may be wrong
    from medconv.training.checks import check_config
    from medconv.training.run import train
    from medconv.training.run_dir import RunDir

    folder = replace(RunDir.of(run_config, composed.choices), started_at=began)
    if run_config.run.dry_run:
        check_config(run_config)
        print(f"# {folder.path}\n{OmegaConf.to_yaml(composed.values)}", end="")
        return DONE
    summary = train(run_config, folder)
    if cluster.is_first():
        print(result_table(summary, folder))
    return DONE


def result_table(summary: dict[str, Any], folder: RunDir) -> str:
    """Scores of the best checkpoint (for segmentation per class), and where everything is."""
    lines = ["", *_score_lines(summary)]
    if summary.get("split_warning"):  # what speaks against the scores
        lines.append(f"caution: {summary['split_warning']}")
    speed = summary.get("samples_per_second") or 0
    data_wait_percent = 100 * (summary.get("data_wait_share") or 0)
    lines += [
        "",
        f"{summary.get('steps')} steps in {summary.get('fit_seconds')} s with validations, in all "
        f"{summary.get('wall_seconds')} s with preparation; {speed:.1f} samples/s, "
        f"{data_wait_percent:.1f} % of the time was spent waiting for data",
    ]
    if summary.get("verdict"):
        lines.append(summary["verdict"])
    if summary.get("stopped_early"):
        lines.append(f"stopped early: {summary['stopped_early']['reason']}")
    lines.append(f"checkpoint  {folder.trained}")
    lines.append(f"summary     {folder.path / 'summary.json'}")
    if (folder.path / "tensorboard").is_dir():
        lines.append(f"TensorBoard tensorboard --logdir {shlex.quote(str(folder.path))}")
    return "\n".join(lines)


def _score_lines(summary: dict[str, Any]) -> list[str]:
    from medconv.targets import Targets
    from medconv.targets.scores import spread_text

    targets = Targets.from_plain(summary["targets"])
    rows = targets.scores.table(summary)
    if not rows:
        return ["no validation"]
    width = max(len(name) for name, _ in rows)
    case_count = len(summary["val/cases"])
    cases = f"{case_count} validation case{'s' * (case_count != 1)}"
    lines = [f"{targets.scores.title} over {cases}, best checkpoint"]
    for name, score in rows:
        lines.append(f"  {name:<{width}}  {score_text(score)}")
    spread = spread_text(targets.scores.case_scores(summary["val/cases"]))
    if spread:
        lines.append(f"  {targets.monitored.words} {spread}")
    return lines
