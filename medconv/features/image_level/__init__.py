"""Targets of whole images: classification, regression, ordered grades, several labels."""

TARGETS = {
    "multiclass": "medconv.features.image_level.multiclass:MulticlassTargets",
    "multilabel": "medconv.features.image_level.multilabel:MultilabelTargets",
    "ordinal": "medconv.features.image_level.multiclass:OrdinalTargets",
    "regression": "medconv.features.image_level.regression:RegressionTargets",
}
PREDICT_OPTIONS = {
    "medconv.features.image_level.saliency_extra:of_options": {
        "flags": {
            "--saliency": {
                "action": "store_true",
                "help": "for classification, also write Grad-CAM pictures, OUTPUT/saliency/CASE.png",
            }
        },
        "folders": {"saliency": ".png"},
    }
}
REPORTS = ("medconv.features.image_level.evaluation:page",)
