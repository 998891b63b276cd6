"""Export trained networks as ONNX, TorchScript, torch.export (pt2), MONAI bundles or safetensors."""

COMMANDS = {
    "export": (
        "write a network as ONNX, TorchScript, MONAI bundle or nnU-Net model",
        "medconv.features.export.command",
    )
}
# Its own door, which other features may use: a name of `--format` -> object, a `Format` of job.py.
EXPORTS = {
    "torchscript": "medconv.features.export.formats:TORCHSCRIPT",
    "pt2": "medconv.features.export.formats:PT2",
    "onnx": "medconv.features.export.formats:ONNX",
    "bundle": "medconv.features.export.monai_bundle:BUNDLE",
    "safetensors": "medconv.features.export.safetensors_folder:SAFETENSORS",
}
