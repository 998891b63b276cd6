"""Exported ONNX files read back, with their metadata."""
