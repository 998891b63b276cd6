"""Export trained networks as ONNX, TorchScript, torch.export (pt2), MONAI bundles or models of nnU-Net."""

COMMANDS = {
    "export": (
        "write a network as ONNX, TorchScript, MONAI bundle or nnU-Net model",
        "medconv.features.export.command",
    )
}
