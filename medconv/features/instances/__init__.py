"""Objects of one kind, such as nuclei or lesions, each with a value of its own in label maps."""

TARGETS = {"instances": "medconv.features.instances.targets:InstanceTargets"}
REPORTS = ("medconv.features.instances.evaluation:page",)
