"""Post-processing of label maps: `medconv predict --postprocess`, and the search for its steps."""

COMMANDS = {
    "find-postprocessing": (
        "choose post-processing steps by cross-validation",
        "medconv.features.postprocessing.command",
    )
}
PREDICT_OPTIONS = {
    "medconv.features.postprocessing.extra:of_options": {
        "flags": {
            "--postprocess": {
                "metavar": "FILE",
                "help": "apply the post-processing in a file from medconv find-postprocessing",
            }
        },
        "folders": {},
    }
}
