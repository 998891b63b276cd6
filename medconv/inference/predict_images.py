"""Many whole images through networks: loaded in threads, some at once through the network, a table row for
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
from medconv.inference.errors import UnwritableError, need_none, reason, unwritable
from medconv.inference.image_predictor import ImagePredictor
from medconv.inference.output_table import TABLE, Answers
from medconv.inference.pipeline import stream
from medconv.inference.predictor import Input
from medconv.utils import signals
from medconv.utils.atomic_io import replacing
from medconv.utils.exit_codes import DONE
from medconv.utils.visualization import png

log = logging.getLogger(__name__)
Loaded = list[tuple[Case, Input | Exception]]
Answered = list[tuple[Input, np.ndarray]]


def predict_whole(
    predictor: ImagePredictor,
    cases: Sequence[Case],
    output: Path,
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
    overwrite: bool = False,
    workers: int = 1,
    saliency: bool = False,
) -> int:
    """A row of `predictions.csv` for each case that has none yet; a case that fails is named at the end, the
    rest is done.

    Args: settings, about: as of `Answers`. workers: batches that are loaded at once. saliency: pictures of
        where the answers come from, too.
    Returns: the exit code.
    Raises: ValueError: `output` holds other results, cases failed, or the disk is full.
    """
    if saliency and all(member.card is not None for member in predictor.members):
        raise ValueError(
            "--saliency needs a network from --checkpoint; exported files have no layers to look at"
        )
    folder, failed = (
        Answers(output, predictor.image_targets, {**settings, "saliency": saliency}, about),
        dict[str, str](),
    )
    limits = threadpool_limits(1, user_api="blas")
    with signals.raising(), folder.open(cases, overwrite) as left, limits, _bar(len(cases)) as bar:
        bar.update(len(cases) - len(left))
        before = len(cases) - len(left)
        size = predictor.batch_size
        batches = [left[start : start + size] for start in range(0, len(left), size)]
        write = partial(_write, predictor, folder, failed, saliency)
        steps = stream(
            batches, partial(_load, predictor), partial(_answered, predictor, failed), write, workers
        )
        for batch, error in steps:
            bar.update(len(batch))
            if isinstance(error, UnwritableError):
                raise error
            if error is not None:
                failed.update({case.id: reason(error) for case in batch})
    made = len(cases) - before - len(failed)
    log.info(
        "%d of %d answers are in %s: %d made now, %d before",
        before + made,
        len(cases),
        output / TABLE,
        made,
        before,
    )
    need_none(failed, len(cases))
    return DONE


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="predicting", unit="case", disable=None)


def _load(predictor: ImagePredictor, batch: Sequence[Case]) -> Loaded:
    loaded: Loaded = []
    for case in batch:
        try:
            given: Input | Exception = predictor.read(case)
        except Exception as error:  # of this case alone
            given = error
        if isinstance(given, Input) and given.warning:
            log.warning("case %s: %s", case.id, given.warning)
        loaded.append((case, given))
    return loaded


def _answered(predictor: ImagePredictor, failed: dict[str, str], loaded: Loaded) -> Answered:
    """All at once; if that fails, one by one, so that one image does not take the others with it."""
    failed.update({case.id: reason(given) for case, given in loaded if isinstance(given, Exception)})
    inputs = [given for _, given in loaded if isinstance(given, Input)]
    if not inputs:
        return []
    try:
        return list(zip(inputs, predictor.answers(inputs), strict=True))
    except Exception:
        found: Answered = []
        for one in inputs:
            try:
                found.append((one, predictor.answers([one])[0]))
            except Exception as error:
                failed[one.case.id] = reason(error)
        return found


def _write(
    predictor: ImagePredictor,
    folder: Answers,
    failed: dict[str, str],
    saliency: bool,
    batch: Sequence[Case],
    found: Answered,
) -> None:
    """The row comes last: with it the case is done. Raises: Unwritable: no room, or no permission."""
    done: Answered = []
    for given, answer in found:
        try:
            if saliency:
                _picture(folder.picture(given.case.id), predictor.overlay(given, answer))
        except OSError as error:
            raise unwritable(folder.path, given.case.id, error) from error
        except Exception as error:  # of this case alone
            failed[given.case.id] = reason(error)
            continue
        done.append((given, answer))
    try:
        if done:
            folder.add([given.case for given, _ in done], np.stack([answer for _, answer in done]))
    except OSError as error:
        raise unwritable(folder.path, batch[0].id, error) from error


def _picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial_file:
        partial_file.write_bytes(png(pixels))
