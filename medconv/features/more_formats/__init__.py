"""Formats of volumes beside the core's NIfTI and pictures: NRRD (3D Slicer) and MetaImage (ITK)."""

IMAGE_FORMATS = (
    "medconv.features.more_formats.metaimage:METAIMAGE",
    "medconv.features.more_formats.metaimage:METAIMAGE_HEADER",
    "medconv.features.more_formats.nrrd:NRRD",
)
