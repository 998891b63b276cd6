"""A mask for each class beside each predicted label map: `medconv predict --masks`."""

PREDICT_OPTIONS = {
    "medconv.features.mask_files.extra:MaskFiles": {
        "flags": {
            "--masks": {
                "action": "store_true",
                "help": "also write OUTPUT/masks/CASE/CLASS.nii.gz, a mask of 0 and 1 for each class",
            }
        },
        "folders": {"masks": ""},
    }
}
