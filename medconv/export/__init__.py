"""Networks as files of other formats: ONNX, TorchScript, torch.export and MONAI bundles."""
