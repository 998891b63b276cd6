"""`perf=autotune`: measures which switches are fastest for this network, patch, batch and machine."""

TUNERS = ("medconv.features.autotune.tune:tune",)
