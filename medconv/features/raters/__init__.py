"""Labels of several raters, or that are probabilities: `data.raters` and `data.soft_labels`."""

TARGETS = {"soft": "medconv.features.raters.targets:SoftTargets"}
