"""The config of a run, as its identity: which keys may change when it resumes."""

from medconv.config import Node, flatten

# Prefixes of keys that may change when a run resumes: none of them changes what is trained.
FREE = (
    "run.",
    "logger.",
    "callbacks.",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "data.prepare_workers",
    "perf.timeout_seconds",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.num_sanity_val_steps",
    "tags",
    "test",
    # These four follow from other keys
    "derived.monitor",
    "derived.stem",
    "derived.num_train_cases",
    "loss.class_names",
    "derived.size",  # what it decides is compared
)


def config_differences(earlier: Node, current: Node) -> list[str]:
    """A line for each key by which two configs train differently."""
    earlier_values = flatten(earlier)
    current_values = flatten(current)
    # Keys of `trainer` that only one version of Lightning has
    of_one_version = {*earlier.get("trainer", {})} ^ {*current["trainer"]}
    free = (*FREE, *(f"trainer.{key}" for key in of_one_version))
    lines = []
    for key in sorted({*earlier_values, *current_values}):
        before = earlier_values.get(key)
        now = current_values.get(key)
        if before != now and not f"{key}.".startswith(free):
            lines.append(f"{key}: {before} there, {now} now")
    return lines
