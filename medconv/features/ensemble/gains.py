"""What each member of an ensemble gained: the score of its own, and that of the mean of all so far."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.config import RunConfig
from medconv.data.case import Case
from medconv.data.case_files import label_of
from medconv.data.io.grids import on_grid
from medconv.data.per_case import source_spacing
from medconv.evaluation.results import plain_number
from medconv.features.ensemble.members import Member
from medconv.inference.predict import usable_device
from medconv.inference.predictor import Predictor
from medconv.metrics import dice as metrics_dice
from medconv.targets import Targets
from medconv.targets.scores import metric_of_summary
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.data_setup import find_data
from medconv.training.run_dir import RunDir
from medconv.utils import signals
from medconv.utils.digests import digest
from medconv.utils.hardware import uses_gpu
from medconv.utils.progress import track

KEY = "members"  # of summary.json
log = logging.getLogger(__name__)


def write(members: Sequence[Member], config: RunConfig, trusted: Sequence[str]) -> None:
    """Write `members` into the summary of the run: for each its folder, its score, and that of the mean.

    The mean of the first members is scored where all have validated the same cases of label maps; what an
    earlier start of the command has scored is not predicted again.

    Args:
        members: trained to their end.
        trusted: packages of the user's own that the networks may come from.
    """
    home = members[0].folder
    summary = home.summary()
    metric = metric_of_summary(summary)
    earlier = summary.get(KEY) or []
    scores_means = _same_label_maps(members)
    rows: list[dict[str, Any]] = []
    for count, member in enumerate(members, 1):
        own = member.folder.summary().get(metric.name)
        row: dict[str, Any] = {
            "folder": str(member.folder.path.relative_to(home.path)),
            "settings": list(member.settings),
            "checkpoint": digest(member.folder.trained)[:8],
            "score": own,
            "score_of_mean": own if count == 1 and scores_means else None,
        }
        if count > 1 and scores_means:
            row["score_of_mean"] = _earlier_score([*rows, row], earlier)
            if row["score_of_mean"] is None:
                row["score_of_mean"] = _score_of_mean(members[:count], config, trusted)
        rows.append(row)
        home.write_summary(**{KEY: rows})


def table(home: RunDir, packages: Sequence[str] = ()) -> str:
    """Scores of the members and of their mean, and how to predict with them.

    Args: packages: that their networks come from.
    """
    summary = home.summary()
    rows = summary[KEY]
    lines = ["", f"member    {metric_of_summary(summary).words}    the mean of the members up to this one"]
    for number, row in enumerate(rows, 1):
        own = plain_number(row["score"])
        mean = plain_number(row["score_of_mean"])
        lines.append(f"{number:<8}  {own:>6}    {mean:>6}    {' '.join(row['settings'])}".rstrip())
    if all(row["score_of_mean"] is None for row in rows):
        lines.append(
            "the mean is not scored: only label maps of classes are, by cases that all members validated"
        )
    folder = shlex.quote(str(home.path))
    flags = "".join(f" --package {name}" for name in packages)
    lines.append(f"\nmedconv predict --checkpoint {folder}{flags} --input IMAGES --output PREDICTIONS")
    return "\n".join(lines)


def _same_label_maps(members: Sequence[Member]) -> bool:
    """Whether all have validated the same cases, and these have label maps."""
    summaries = [member.folder.summary() for member in members]
    cases = [set(summary.get("val/cases") or ()) for summary in summaries]
    answers_classes = Targets.from_plain(summaries[0]["targets"]).answers_classes
    return answers_classes and bool(cases[0]) and all(other == cases[0] for other in cases)


def _earlier_score(rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> float | None:
    """The score of the mean of the same checkpoints in an earlier summary; None: it has none."""
    if len(earlier) < len(rows):
        return None
    if any(row["checkpoint"] != other["checkpoint"] for row, other in zip(rows, earlier, strict=False)):
        return None
    score: float | None = earlier[len(rows) - 1]["score_of_mean"]
    return score


def _score_of_mean(members: Sequence[Member], config: RunConfig, trusted: Sequence[str]) -> float | None:
    """The mean Dice over the validation cases of the mean of the members' best checkpoints."""
    device = usable_device(None if uses_gpu(config.trainer.accelerator) else "cpu")
    checkpoints: list[Path | str] = [member.folder.trained for member in members]
    predictor = Predictor.load(checkpoints, device, trusted)
    validated = members[0].folder.summary()["val/cases"]
    dataset = find_data(config.data)
    cases = [case for case in dataset.cases if case.id in validated]
    with signals.raising():
        rows = {
            case.id: _dice(predictor, case)
            for case in track(cases, f"validating the mean of {len(members)} members")
        }
    return metrics_dice.mean(metrics_dice.mean_per_class(list(rows.values())).values())


def _dice(predictor: Predictor, case: Case) -> dict[str, float | None]:
    (scores,) = predictor.scores([predictor.read(case)])
    targets = predictor.targets
    assert isinstance(targets, SegmentationTargets)
    reference, grid = label_of(case)
    assert case.label is not None
    grid = grid.with_spacing_mm(source_spacing(predictor.members[0].source_spacing_mm, case.id))
    reference = on_grid(reference, case.images[0], scores.crop.grid, case.label, grid)
    annotated = None if case.annotated is None else targets.annotated_outputs(case.annotated)
    return targets.dice(predictor.answer(scores), reference, annotated)
