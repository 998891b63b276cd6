"""The sampler of a run: chosen by `sampler`, or by keys of `data`; and what the log says about its cases."""

import logging
from collections import Counter
from collections.abc import Sequence

from medconv import config as configs
from medconv.config import ConfigError, DataConfig, Node
from medconv.data.case import Case, Dataset
from medconv.data.loading.samplers import ForegroundSampler, Sampler, TrainingCases, balanced

log = logging.getLogger(__name__)


def build_sampler(node: Node, data: DataConfig, cases: TrainingCases) -> Sampler:
    """The sampler of a resolved config.

    Args:
        node: the config's `sampler`; without a `_target_`, keys of `data` choose it.
    Raises:
        ConfigError: the node describes no sampler, or one that does not use a key of `data` that is set.
        ValueError: balanced sampling for targets without classes.
    """
    foreground_share = data.oversample_foreground
    sets_share = foreground_share != DataConfig.oversample_foreground
    if sets_share and cases.patch is None:
        log.info("data.oversample_foreground has no effect: whole images with values have no foreground")
    if node.get("_target_") is None:
        make_sampler = balanced if data.balanced_sampling else ForegroundSampler
        return make_sampler(cases, foreground_share)
    target = node["_target_"]
    sampler = configs.build(node, "sampler", cases=cases)
    if not isinstance(sampler, Sampler):
        raise ConfigError(f"sampler._target_={target} must make a {Sampler.__module__}.Sampler")
    if data.balanced_sampling and not sampler.balances_classes:
        raise ConfigError(
            f"data.balanced_sampling=true has no effect with sampler._target_={target}; set only one of "
            "them, or choose sampler=balanced"
        )
    if sets_share and cases.patch is not None and foreground_share != sampler.foreground_share:
        raise ConfigError(
            f"data.oversample_foreground={foreground_share} has no effect with sampler._target_={target}, "
            f"whose foreground_share is {sampler.foreground_share:g}; set only one of them"
        )
    return sampler


def announce(train: Sequence[Case], dataset: Dataset) -> None:
    """Log which classes training cases annotate, and their weights; nothing where all cases are alike."""
    if any(case.annotated is not None for case in train):
        counts = [
            f"{name} in {sum(case.annotated is None or value in case.annotated for case in train)}"
            for value, name in enumerate(dataset.class_names[1:], start=1)
        ]
        log.info("data: annotated, of %d training cases: %s", len(train), ", ".join(counts))
    weights = Counter(case.weight for case in train)
    if len(weights) > 1:
        counts = [f"{weight:g} of {count}" for weight, count in sorted(weights.items())]
        log.info("data: training cases are drawn by weight: %s", ", ".join(counts))
