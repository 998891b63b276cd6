"""Targets of whole images: classification, regression, ordered grades, several labels."""

TARGETS = {
    "multiclass": "medconv.features.image_level.multiclass:MulticlassTargets",
    "multilabel": "medconv.features.image_level.multilabel:MultilabelTargets",
    "ordinal": "medconv.features.image_level.multiclass:OrdinalTargets",
    "regression": "medconv.features.image_level.regression:RegressionTargets",
}
PREDICT_OPTIONS = ("medconv.features.image_level.saliency_option",)
PREDICTION_FOLDERS = {"saliency": ".png"}
