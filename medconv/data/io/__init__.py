"""One module per image format: NIfTI, NRRD, MGH, DICOM, DICOM SEG, PNG, JPEG, TIFF and GIF."""
