"""`medconv-predict`: label NIfTIs on the grids of the inputs, from a checkpoint."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from medconv import commands, run
from medconv.data.case import Case
from medconv.data.files import in_folder, read_image, stem, write_label
from medconv.data.layout import group_channels
from medconv.data.preprocess import preprocess, restore

RECORD = "prediction.json"  # beside the predictions: what made them
log = logging.getLogger(__name__)


def main() -> None:
    sys.exit(commands.guard(_main))


def _main() -> int:
    options = _parser().parse_args()
    commands.start_logging()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = run.load(options.checkpoint, options.allow, device)
    cases = find_cases(options.input, len(model.modalities))
    return predict(model, cases, options.output, device, {"checkpoint": str(options.checkpoint)})


def predict(model: run.Trained, cases: list[Case], output: Path, device: str, record: dict[str, Any]) -> int:
    """Write one label map per case; a case that fails is named at the end, the rest is done.

    Returns: the exit code.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / RECORD).write_text(
        json.dumps({**record, "class_names": model.class_names, "targets": model.targets.plain()}, indent=2) + "\n"
    )
    failed = []
    for case in tqdm(cases, desc="predicting", unit="case", disable=None):
        try:
            predict_case(model, case, output / f"{case.id}.nii.gz", device)
        except ValueError as error:
            failed.append(f"  case {case.id}: {error}")
    log.info("%d of %d predictions written to %s", len(cases) - len(failed), len(cases), output)
    if failed:
        raise ValueError(f"{len(failed)} of {len(cases)} cases could not be predicted\n" + "\n".join(failed))
    return commands.DONE


@torch.inference_mode()
def predict_case(model: run.Trained, case: Case, path: Path, device: str) -> None:
    """One case, exactly as validation has it. Raises: ValueError: its files are at fault."""
    image, grid = read_image(case.images)
    if len(image) != len(model.modalities):
        raise ValueError(
            f"{case.images[0]}: the network was trained on {len(model.modalities)} channels, found {len(image)}"
        )
    if (grid.shape[2] == 1) != (model.recipe.image_dims == 2):
        kind = f"{model.recipe.spatial_dims}D" + (" on slices of volumes" if model.recipe.slice_axis is not None else "")
        raise ValueError(f"{case.images[0]}: the network is {kind}, the image has shape {grid.shape}")
    if not (abs(image) < float("inf")).all():
        raise ValueError(f"{case.images[0]}: has voxels that are NaN or infinite, expected finite numbers")
    array, placement = preprocess(image, grid, model.recipe)
    with autocast(model.precision, device):
        logits = model.window(
            lambda x: model.network(x.contiguous(memory_format=model.memory_format)),
            torch.from_numpy(array)[None].to(device),
        )
    write_label(path, restore(logits[0].float(), placement, model.targets.decode), case.images[0])


def autocast(precision: str, device: str) -> Any:
    """The autocast that Lightning's `trainer.precision` means."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    return torch.autocast(torch.device(device).type, dtype) if dtype else nullcontext()


def find_cases(source: Path, num_channels: int) -> list[Case]:
    """The cases in a file or a folder; several channels are files CASE_0000, CASE_0001, ... or one 4D file.

    Raises: ValueError: nothing there, or channels missing.
    """
    if source.is_file():
        return [Case(stem(source), (source,))]
    if not source.exists():
        raise ValueError(f"--input {source}: no such file or folder")
    files = list(in_folder(source, "--input").values())
    try:
        return [Case(case, channels) for case, channels in group_channels(files, num_channels).items()]
    except ValueError:
        if num_channels > 1 and any(stem(path)[-5:] == "_0000" for path in files):
            raise
        return [Case(stem(path), (path,)) for path in files]  # one file per case


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("medconv-predict", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run's checkpoints/best.ckpt")
    parser.add_argument("--input", type=Path, required=True, help="an image, or a folder of images")
    parser.add_argument("--output", type=Path, required=True, help="folder for the label maps")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; the accelerator where there is one")
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="trust network classes of a package")
    return parser


if __name__ == "__main__":
    main()
