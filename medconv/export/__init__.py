"""Export trained networks as ONNX, TorchScript, torch.export (pt2) or MONAI bundles."""
