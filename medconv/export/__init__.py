"""Export trained networks as ONNX, TorchScript, torch.export (pt2), MONAI bundles or models of nnU-Net."""
