"""Targets that are images: denoising, finer resolution, another modality, dose."""

TARGETS = {"continuous": "medconv.features.continuous.targets:ContinuousTargets"}
REPORTS = ("medconv.features.continuous.evaluation:page",)
