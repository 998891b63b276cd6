"""Predictions of image-level networks for many cases: loaded in threads, run in batches, one table row
each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from medconv.data.case import Case
from medconv.inference.errors import UnwritableError, check_all_predicted, reason, unwritable
from medconv.inference.image_level_predictor import ImageLevelPredictor
from medconv.inference.output_table import TABLE, OutputTable
from medconv.inference.pipeline import stream
from medconv.inference.predictor import Input
from medconv.utils import signals
from medconv.utils.atomic_io import replacing
from medconv.utils.exit_codes import DONE
from medconv.utils.visualization import png

log = logging.getLogger(__name__)
LoadedBatch = list[tuple[Case, Input | Exception]]
PredictedBatch = list[tuple[Input, np.ndarray]]


def predict_image_level(
    predictor: ImageLevelPredictor,
    cases: Sequence[Case],
    output: Path,
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
    overwrite: bool = False,
    workers: int = 1,
    saliency: bool = False,
) -> int:
    """Write a row of `predictions.csv` for each case that has none yet. Cases that fail are named at the end,
    and do not stop the others.

    Args: settings, about: as in `OutputTable`. workers: batches that are loaded at once. saliency: also write
        Grad-CAM pictures.
    Returns: the exit code.
    Raises: ValueError: `output` holds other results, cases failed, or the disk is full.
    """
    if saliency and all(member.metadata_path is not None for member in predictor.members):
        raise ValueError(
            "--saliency needs a network from --checkpoint; exported models have no layers to look at"
        )
    table = OutputTable(output, predictor.image_targets, {**settings, "saliency": saliency}, about)
    failed: dict[str, str] = {}
    limits = threadpool_limits(1, user_api="blas")
    with signals.raising(), table.open(cases, overwrite) as remaining, limits, _bar(len(cases)) as bar:
        before = len(cases) - len(remaining)
        bar.update(before)
        size = predictor.batch_size
        batches = [remaining[start : start + size] for start in range(0, len(remaining), size)]
        load, predict = partial(_load, predictor), partial(_predict, predictor, failed)
        write = partial(_write, predictor, table, failed, saliency)
        for batch, error in stream(batches, load, predict, write, workers):
            bar.update(len(batch))
            if isinstance(error, UnwritableError):
                raise error
            if error is not None:
                failed.update({case.id: reason(error) for case in batch})
    new = len(cases) - before - len(failed)
    log.info(
        "%d of %d predictions are in %s: %d made now, %d before",
        before + new,
        len(cases),
        output / TABLE,
        new,
        before,
    )
    check_all_predicted(failed, len(cases))
    return DONE


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="predicting", unit="case", disable=None)


def _load(predictor: ImageLevelPredictor, batch: Sequence[Case]) -> LoadedBatch:
    loaded: LoadedBatch = []
    for case in batch:
        try:
            result: Input | Exception = predictor.read(case)
        except Exception as error:  # of this case alone
            result = error
        if isinstance(result, Input) and result.warning:
            log.warning("case %s: %s", case.id, result.warning)
        loaded.append((case, result))
    return loaded


def _predict(predictor: ImageLevelPredictor, failed: dict[str, str], loaded: LoadedBatch) -> PredictedBatch:
    """The batch in one forward pass; if that fails, image by image, so that only the failing case is lost."""
    failed.update({case.id: reason(result) for case, result in loaded if isinstance(result, Exception)})
    inputs = [result for _, result in loaded if isinstance(result, Input)]
    if not inputs:
        return []
    try:
        return list(zip(inputs, predictor.predict_batch(inputs), strict=True))
    except Exception:
        predicted: PredictedBatch = []
        for single in inputs:
            try:
                predicted.append((single, predictor.predict_batch([single])[0]))
            except Exception as error:
                failed[single.case.id] = reason(error)
        return predicted


def _write(
    predictor: ImageLevelPredictor,
    table: OutputTable,
    failed: dict[str, str],
    saliency: bool,
    batch: Sequence[Case],
    predicted: PredictedBatch,
) -> None:
    """Rows are written after the pictures: a case with a row is done. Raises: UnwritableError: the disk is
    full, or no permission.
    """
    done: PredictedBatch = []
    for case_input, outputs in predicted:
        try:
            if saliency:
                _write_png(table.saliency(case_input.case.id), predictor.overlay(case_input, outputs))
        except OSError as error:
            raise unwritable(table.path, case_input.case.id, error) from error
        except Exception as error:  # of this case alone
            failed[case_input.case.id] = reason(error)
            continue
        done.append((case_input, outputs))
    try:
        if done:
            table.add([case_input.case for case_input, _ in done], np.stack([outputs for _, outputs in done]))
    except OSError as error:
        raise unwritable(table.path, batch[0].id, error) from error


def _write_png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial_file:
        partial_file.write_bytes(png(pixels))
