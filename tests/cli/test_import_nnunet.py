"""Options of `medconv import-nnunet`."""

from pathlib import Path

from medconv.cli import import_nnunet


def test_folds_and_checkpoint_have_defaults() -> None:
    options = import_nnunet.parser().parse_args(["model", "--output", "runs/m"])
    assert (options.folder, options.output) == (Path("model"), Path("runs/m"))
    assert options.folds is None and options.checkpoint == "checkpoint_final.pth"
    assert import_nnunet.parser().parse_args(["m", "--output", "o", "--folds", "0", "all"]).folds == [
        "0",
        "all",
    ]
