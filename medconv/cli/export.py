"""`medconv export`: write a trained network as ONNX, TorchScript, torch.export or a MONAI bundle."""

from pathlib import Path

from medconv.cli.parsers import Parser, add_trust

# The same as in medconv/export, whose import would load torch
FORMATS = ("torchscript", "pt2", "onnx", "bundle")
OPSET, TOLERANCE = 18, 1e-4


def parser() -> Parser:
    command = Parser(
        "export",
        "--checkpoint runs/NAME/checkpoints/best.ckpt --format onnx --output model.onnx",
        "Write the network of a checkpoint in another format, with its metadata beside it. Its logits are "
        "compared with the checkpoint's; if they differ, nothing is written.",
    )
    add = command.add_argument_group("input and output").add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="a run's checkpoints/best.ckpt")
    add("--format", required=True, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    add("--output", type=Path, required=True, metavar="PATH", help="the file; for a bundle, a new folder")
    add("--opset", type=int, default=OPSET, metavar="N", help="ONNX operator set; default %(default)s")
    add = command.add_argument_group("comparison with the checkpoint").add_argument
    case = "also compare logits on this image, not only on random patches"
    add("--case", type=Path, metavar="IMAGE", help=case)
    tolerance = "largest difference over the largest logit; default %(default)g"
    add("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    add_trust(command.general(), "network classes")
    return command
