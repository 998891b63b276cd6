"""A label map and a value of each image, such as a class or a number, from one network."""

TARGETS = {"joint": "medconv.features.joint.targets:JointTargets"}
