"""Targets of whole images: classification, regression, ordered grades, several labels."""

TARGETS = {
    "multiclass": "medconv.targets.multiclass:MulticlassTargets",
    "multilabel": "medconv.targets.multilabel:MultilabelTargets",
    "ordinal": "medconv.targets.ordinal:OrdinalTargets",
    "regression": "medconv.targets.regression:RegressionTargets",
}
