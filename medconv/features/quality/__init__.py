"""How sure networks are of a case: `medconv predict --quality`, and whether `medconv evaluate` agrees."""

PREDICT_OPTIONS = ("medconv.features.quality.option",)
PREDICTION_FOLDERS = {"uncertainty": ".nii.gz", "quality": ".json"}
EVALUATIONS = ("medconv.features.quality.predicted_quality",)
