"""What steps cost on this machine: `perf=autotune`, and the size of a plan for `trainer.max_time`."""

TUNERS = {
    "settings": "medconv.features.autotune.tune:tune",
    "size": "medconv.features.autotune.plan_size:size_for_time",
    "steps": "medconv.features.autotune.plan_size:steps_in_time",
}
