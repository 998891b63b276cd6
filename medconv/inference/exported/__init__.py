"""Load exported ONNX models with their metadata."""
