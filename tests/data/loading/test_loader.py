"""medconv/data/loading/loader.py: workers and the signals of a run."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

from medconv.data.loading import loader


def test_workers_heed_the_main_process_alone() -> None:
    """They leave what a terminal or Slurm sends to it, and end by its SIGTERM, as multiprocessing ends what
    hangs.
    """
    pipe, of_worker = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=_worker_that_answers, args=(of_worker,), daemon=True)
    worker.start()
    of_worker.close()
    assert pipe.recv() == "started"
    os.kill(worker.pid or 0, signal.SIGINT)  # as a terminal sends it to all
    os.kill(worker.pid or 0, signal.SIGUSR1)
    pipe.send("after both signals")
    assert pipe.recv() == "after both signals"
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0


def _worker_that_answers(pipe: Connection) -> None:
    loader.init_worker(0)
    pipe.send("started")
    while True:
        pipe.send(pipe.recv())
