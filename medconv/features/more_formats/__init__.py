"""Formats of volumes that need a package of their own: NRRD (3D Slicer) and MetaImage (ITK)."""

IMAGE_FORMATS = (
    "medconv.features.more_formats.metaimage:METAIMAGE",
    "medconv.features.more_formats.metaimage:METAIMAGE_HEADER",
    "medconv.features.more_formats.nrrd:NRRD",
)
