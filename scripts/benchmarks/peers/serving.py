"""What the peers of the data benchmark share: their options, their one core, the line protocol.

Nothing here needs more than Python itself, as peers run where medconv is not installed.

The protocol, one line each: a peer says {"ready": true, "name": ..., "cores": [...]} once; "run SECONDS" has
it work until that many seconds of work are over, and is answered by {"seconds": ..., "samples": ...}; "quit"
or the end of the input ends it. All that libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any, TextIO

MODES = ("loader", "transforms", "prepare")
FOREGROUND_SHARE = 0.33  # of the patches, for every contestant; nnU-Net rounds it to a half at batch 2


def parse(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument(
        "--raw", type=Path, required=True, help="a dataset in nnU-Net's raw layout, .../DatasetXXX_Name"
    )
    parser.add_argument("--scratch", type=Path, required=True, help="what is prepared is kept there")
    parser.add_argument("--patch", type=int, nargs=3, required=True, help="voxels; axes as in the files")
    parser.add_argument(
        "--spacing", type=float, nargs=3, required=True, help="mm to resample to; axes as in the files"
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of `prepare`")
    parser.add_argument("--core", type=int, help="the only one that this peer and its worker run on")
    parser.add_argument(
        "--labels", choices=("linear", "nearest"), default="linear", help="how labels are resampled; nnU-Net"
    )
    parser.add_argument("--augment", default="strong", help="an option of conf/augmentation; ours")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of `transforms`; ours")
    return parser.parse_args()


def one_thread() -> None:
    """Before any library is imported."""
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS",
    ):
        os.environ[name] = "1"


def pin(core: int | None) -> None:
    """This process and all that it starts from here on; what was prepared before may have used every core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def need(module: str, name: str, package: str) -> None:
    """Ends this process with a message where its environment lacks the peer."""
    if util.find_spec(module) is None:
        sys.exit(
            f"{name} is not installed for {sys.executable}; give it an environment of its own: "
            f"python3 -m venv FOLDER && FOLDER/bin/pip install {package}"
        )


def own_stdout() -> TextIO:
    """The standard output for the protocol alone; whatever else prints there, at any depth, prints to
    standard error.
    """
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return channel


def say(channel: TextIO, **fields: Any) -> None:
    channel.write(json.dumps(fields) + "\n")
    channel.flush()


def serve(
    channel: TextIO,
    name: str,
    work: Callable[[], int],
    fresh: Callable[[], Any] | None = None,
    **details: Any,
) -> None:
    """Answer requests until there are no more.

    Args:
        work: one piece, timed. Returns: samples (or cases) done.
        fresh: called before every piece, not timed.
        details: said in every answer, too; a mapping that `work` may fill.
    """
    say(channel, ready=True, name=name, cores=sorted(os.sched_getaffinity(0)))
    for line in sys.stdin:
        word, _, limit = line.strip().partition(" ")
        if word != "run":
            break
        say(channel, **_piecewise(work, fresh, float(limit)), **details)


def _piecewise(
    work: Callable[[], int],
    fresh: Callable[[], Any] | None,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    seconds, samples = 0.0, 0
    while not samples or seconds < limit_s:
        if fresh is not None:
            fresh()
        start = clock()
        samples += work()
        seconds += clock() - start
    return {"seconds": seconds, "samples": samples}


def pulling(batches: Iterator[Any], count: Callable[[Any], int]) -> Callable[[], int]:
    """Work that takes the next batch; the first is taken here, so that a peer is ready when its loader is."""
    next(batches)
    return lambda: count(next(batches))


class Transforming:
    """Work that transforms one patch, or batch, in memory.

    Args: draw: gives one as it comes before the transform; not timed.
    """

    def __init__(self, draw: Callable[[], Any], transform: Callable[[Any], Any], samples: int = 1) -> None:
        self._draw, self._transform, self._samples = draw, transform, samples
        self._next: Any = None

    def fresh(self) -> None:
        self._next = self._draw()

    def __call__(self) -> int:
        self._transform(self._next)
        return self._samples


def files(raw: Path) -> list[Mapping[str, str]]:
    """Image and label of every case of one channel, in the raw layout."""
    images = sorted((raw / "imagesTr").glob("*_0000.nii.gz"))
    return [{"image": str(i), "label": str(raw / "labelsTr" / i.name.replace("_0000", ""))} for i in images]
