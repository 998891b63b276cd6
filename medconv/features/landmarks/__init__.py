"""Points with names, such as insertions or fiducials, learned as heatmaps; files as Slicer has them."""

TARGETS = {"landmarks": "medconv.features.landmarks.targets:LandmarkTargets"}
REPORTS = ("medconv.features.landmarks.evaluation:page",)
