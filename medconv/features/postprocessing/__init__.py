"""Post-processing of label maps: `medconv predict --postprocess`, and the search for its steps."""

COMMANDS = {
    "find-postprocessing": (
        "choose post-processing steps by cross-validation",
        "medconv.features.postprocessing.command",
    )
}
PREDICT_OPTIONS = ("medconv.features.postprocessing.option",)
