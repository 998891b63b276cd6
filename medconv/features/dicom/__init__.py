"""DICOM: series as images, contours (RTSTRUCT) as labels, and label maps as DICOM SEG."""

IMAGE_FORMATS = ("medconv.features.dicom.format:DICOM",)
PREDICT_OPTIONS = {
    "medconv.features.dicom.seg_extra:of_options": {
        "flags": {
            "--dicom-seg": {
                "action": "store_true",
                "help": "for DICOM input, also write OUTPUT/dicomseg/CASE.dcm, which refers to the slices",
            }
        },
        "folders": {"dicomseg": ".dcm"},
    }
}
