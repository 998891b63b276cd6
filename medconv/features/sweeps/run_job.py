"""A job of a sweep, in a process of its own: `medconv train`, which leaves in its folder why it failed.

python -m medconv.features.sweeps.run_job FOLDER ARGUMENTS
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from medconv.cli.entrypoint import guard
from medconv.cli.main import run


def main() -> None:
    folder, *arguments = sys.argv[1:]
    sys.exit(guard(partial(train, Path(folder), arguments)))


def train(folder: Path, arguments: Sequence[str]) -> int:
    """`medconv train` with these arguments. Returns: the exit code. Args: folder: of the run."""
    try:
        return run(["train", *arguments])
    except Exception as error:
        from medconv.features.sweeps.job import note_failure  # loads torch

        note_failure(folder, error)
        raise


if __name__ == "__main__":
    main()
