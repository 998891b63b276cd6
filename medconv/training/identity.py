"""A run's identity, its config and its data: a run of other keys, cases, images or labels is another run."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medconv.config import Node, flatten
from medconv.config.values import as_text
from medconv.data.preprocessing.store import BROKEN
from medconv.utils.hardware import FULL_NAMES
from medconv.utils.logging import some

# Prefixes of keys that may change when a run resumes: none of them changes what is trained.
FREE = (
    "run.",
    "logger.",
    "callbacks.",
    "data.cache_dir",
    "data.store",
    "data.num_workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "data.prepare_workers",
    "perf.timeout_seconds",
    # data.global_batch_size is compared
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.num_sanity_val_steps",
    "tags",
    "test",
    # These five follow from other keys
    "derived.modalities",
    "derived.monitor",
    "derived.stem",
    "derived.num_train_cases",
    "loss.class_names",
    "derived.size",  # what it decides is compared
)
# Parts of keys of `data` that say where files are; what the files hold is compared.
_PLACES = ("root", "images", "labels", "raters")
log = logging.getLogger(__name__)
_EARLIER = dict.fromkeys(("derived.batch_dice", "loss.batch_dice", "loss.segmentation.batch_dice"), True)
CASES_FILE = "cases.json"  # in the run's folder
DataIdentity = Mapping[str, Mapping[str, int]]  # `train` or `val` to case id to a digest of its content


def config_differences(earlier: Node, current: Node) -> list[str]:
    """A line for each key by which two configs train differently."""
    earlier_values = settings_of(earlier)
    current_values = settings_of(current)
    # Keys of `trainer` that only one version of Lightning has
    of_one_version = {*earlier.get("trainer", {})} ^ {*current["trainer"]}
    free = (*FREE, *(f"trainer.{key}" for key in of_one_version))
    # This callback of Lightning's changes the steps
    accumulates = tuple(
        f"callbacks.{name}."
        for config in (earlier, current)
        for name, callback in (config.get("callbacks") or {}).items()
        if str((callback or {}).get("_target_")).endswith("GradientAccumulationScheduler")
    )
    lines = []
    for key in sorted({*earlier_values, *current_values}):
        before = earlier_values.get(key)
        now = current_values.get(key)
        is_free = f"{key}.".startswith(free) and not key.startswith(accumulates)
        if before != now and not is_free and not _is_place(key):
            lines.append(f"{key}: {as_text(before)} there, {as_text(now)} now")
    return lines


def settings_of(config: Node) -> dict[str, Any]:
    """Settings by dotted key; those that earlier versions lacked have the value that these used, and a
    precision has its full name.
    """
    settings = {**_EARLIER, **flatten(config)}
    precision = str(settings.get("trainer.precision"))
    return {**settings, "trainer.precision": FULL_NAMES.get(precision, precision)}


def _is_place(key: str) -> bool:
    group, *parts = key.split(".")
    return group == "data" and any(part in _PLACES for part in parts)


def read_data_identity(folder: Path) -> DataIdentity | None:
    """The data of the run in a folder; None: it has none that can be read, as runs of earlier versions."""
    try:
        content = json.loads((folder / CASES_FILE).read_text(encoding="utf-8"))
        return {split: dict(content[split]) for split in ("train", "val")}
    except (*BROKEN, KeyError):
        return None


def data_differences(earlier: DataIdentity, current: DataIdentity) -> list[str]:
    """One line for each kind of difference, with the first few cases; empty: the same data."""
    return [*_moves(earlier, current), *changes(earlier, current)]


def _moves(earlier: DataIdentity, current: DataIdentity) -> Iterator[str]:
    words = {"train": "trained on", "val": "validated"}
    for split, word in words.items():
        gone = [case for case in earlier[split] if case not in current[split]]
        added = [case for case in current[split] if case not in earlier[split]]
        if gone:
            yield f"no longer {word}: {some(gone)}"
        if added:
            yield f"now {word}: {some(added)}"


def warn_of_other_data(checkpoint: Path, current: DataIdentity) -> None:
    """Say in what the data differs from that of the checkpoint's run, which is continued on purpose."""
    earlier = read_data_identity(checkpoint.resolve().parent.parent)
    if earlier is None:
        return
    lines = data_differences(earlier, current)
    if lines:
        log.warning("run.resume=%s: its run had other data: %s", checkpoint, "; ".join(lines))
    _warn_of_leaks(f"run.resume={checkpoint}", earlier, current)


def warn_of_seen_cases(weights: Path, current: DataIdentity, same_root: bool) -> None:
    """Say which cases that are validated now pretrained weights were trained on, if a run has them.

    Args:
        same_root: whether its data are in the same folder, so that a case is the one of the same name; else
            only one of the same content is.
    """
    earlier = read_data_identity(weights.parent.parent)
    if earlier is None:
        return
    if not same_root:
        equal = {
            case: digest for case, digest in earlier["train"].items() if digest == current["val"].get(case)
        }
        earlier = {**earlier, "train": equal}
    _warn_of_leaks(f"init.pretrained={weights}", earlier, current)


def _warn_of_leaks(source: str, earlier: DataIdentity, current: DataIdentity) -> None:
    leaked = leaks(earlier, current)
    if leaked:
        log.warning(
            "%s: trained on cases that are validated now, so their scores are too high: %s",
            source,
            some(leaked),
        )


def leaks(earlier: DataIdentity, current: DataIdentity) -> list[str]:
    """Cases that are validated now and were trained on earlier."""
    return [case for case in current["val"] if case in earlier["train"]]


def changes(earlier: DataIdentity, current: DataIdentity) -> Iterator[str]:
    """A line that names cases in both whose content differs; none if they are the same."""
    before = {**earlier["val"], **earlier["train"]}
    now = {**current["val"], **current["train"]}
    changed = [case for case in now if case in before and now[case] != before[case]]
    if changed:
        yield f"other image, label, values or weight: {some(changed)}"
