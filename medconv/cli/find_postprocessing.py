"""`medconv find-postprocessing`: choose post-processing steps by cross-validation."""

from pathlib import Path

from medconv.cli.parsers import Parser, add_device, add_trust


def parser() -> Parser:
    command = Parser(
        "find-postprocessing",
        "--runs runs/cv",
        "Predict the validation cases of every fold, and write the post-processing that raises Dice to "
        "RUNS/postprocessing.json, for medconv predict --postprocess. To train the folds: "
        "medconv train -m data.fold=0,1,2,3,4 run.name=cv",
    )
    inputs = command.add_argument_group("input")
    inputs.add_argument(
        "--runs", type=Path, required=True, metavar="FOLDER", help="folder of a cross-validation"
    )
    inputs.add_argument(
        "--select", metavar="OVERRIDES", help="which cross-validation to use, if the folder holds several"
    )
    general = command.general()
    add_device(general)
    add_trust(general, "classes")
    return command
