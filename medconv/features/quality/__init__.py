"""How sure networks are of a case: `medconv predict --quality`, and whether `medconv evaluate` agrees."""

PREDICT_OPTIONS = {
    "medconv.features.quality.extra:of_options": {
        "flags": {
            "--quality": {
                "action": "store_true",
                "help": "also write OUTPUT/quality/CASE.json, an estimate of Dice, and "
                "OUTPUT/uncertainty/CASE.nii.gz",
            },
            "--calibration": {
                "metavar": "FILE",
                "help": "with --quality: metrics.json of medconv evaluate, to also write the expected Dice",
            },
        },
        "folders": {"uncertainty": ".nii.gz", "quality": ".json"},
    }
}
EVALUATIONS = ("medconv.features.quality.predicted_quality",)
