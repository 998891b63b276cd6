"""DICOM: series as images, contours (RTSTRUCT) as labels, and label maps as DICOM SEG."""

IMAGE_FORMATS = ("medconv.features.dicom.format:DICOM",)
PREDICT_OPTIONS = ("medconv.features.dicom.seg_option",)
PREDICTION_FOLDERS = {"dicomseg": ".dcm"}
