"""DICOM: series as images, contours (RTSTRUCT) and segmentations (SEG) as labels and as predictions."""

IMAGE_FORMATS = ("medconv.features.dicom.format:DICOM",)
PREDICT_OPTIONS = {
    "medconv.features.dicom.extras:DicomSeg": {
        "flags": {
            "--dicom-seg": {
                "action": "store_true",
                "help": "for DICOM input, also write OUTPUT/dicomseg/CASE.dcm, which refers to the slices",
            }
        },
        "folders": {"dicomseg": ".dcm"},
    },
    "medconv.features.dicom.extras:RTStruct": {
        "flags": {
            "--rtstruct": {
                "action": "store_true",
                "help": "for DICOM input, also write OUTPUT/rtstruct/CASE.dcm: contours on the slices",
            }
        },
        "folders": {"rtstruct": ".dcm"},
    },
}
