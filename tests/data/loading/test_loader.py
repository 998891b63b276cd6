"""medconv/data/loading/loader.py: workers and the signals of a run."""

import multiprocessing
import os
import resource
import signal
import sys
import threading
from multiprocessing import reduction, resource_sharer
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.processes import is_running
from helpers.waiting import PATIENCE_S, until
from torch.utils.data import Dataset

from medconv.data.loading import loader
from medconv.data.loading.loader import check_room, largest_case_bytes, patch_bytes
from medconv.data.preprocessing.preprocess import NOTHING, Entry
from medconv.utils import signals
from medconv.utils.errors import ArgumentError


def test_workers_heed_the_main_process_alone():
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
    os.kill(worker.pid or 0, signal.SIGHUP)
    pipe.send("after these signals")
    assert pipe.recv() == "after these signals"
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0


@pytest.mark.parametrize("asks", [False, True])
def test_workers_are_silent_where_the_main_process_stops_receiving(capfd, asks):
    """As at the death of another worker, which the main process reports."""
    pipe, of_worker = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_worker_that_shares, args=(of_worker,))
    worker.start()
    address, key = pipe.recv()
    with Client(address, authkey=multiprocessing.current_process().authkey) as connection:
        if asks:
            connection.send((key, os.getpid()))
            assert os.read(connection.fileno(), 1)
    assert pipe.recv()
    pipe.send("done")
    worker.join()
    assert capfd.readouterr().err == ""


def _worker_that_shares(pipe):
    """Sends where another process gets what it shares, and then whether it heard of the loss."""
    loader.init_worker(0)
    reduction.ACKNOWLEDGE = True  # as in Python 3.14
    heard, hook = threading.Event(), sys.excepthook
    sys.excepthook = lambda *error: (hook(*error), heard.set())
    pipe.send(resource_sharer.DupFd(0)._id)
    pipe.send(heard.wait(PATIENCE_S))
    pipe.recv()


def _worker_that_answers(pipe):
    loader.init_worker(0)
    pipe.send("started")
    while True:
        pipe.send(pipe.recv())


class Stopping(Dataset[torch.Tensor]):
    """Its worker stops itself, as by Ctrl-Z, and answers no signal but SIGKILL."""

    processes = ()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSTOP)
        return torch.ones(1)


class StoppingAsTheRunIs(Stopping):
    """The run gets SIGTERM while it waits for this worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getppid(), signal.SIGTERM)
        return super().__getitem__(index)


def test_a_signal_ends_the_wait_for_a_stopped_worker_and_the_worker(monkeypatch):
    monkeypatch.setattr(signals, "WAIT_SECONDS", 0.2)
    request = signals.StopRequest()
    request.defer()
    batches = loader.Loader(
        StoppingAsTheRunIs(),
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=loader.init_worker,
        persistent_workers=True,
        stop_request=request,
    )
    with pytest.raises(signals.RunInterrupted), request.noted():
        list(batches)
    (worker,) = batches._iterator._workers
    until(lambda: not is_running(worker.pid))


def test_a_batch_that_does_not_come_is_a_warning_that_names_the_worker(caplog):
    """Once for each wait."""
    batches = loader.Loader(
        Stopping(), num_workers=1, multiprocessing_context="fork", worker_init_fn=loader.init_worker
    )
    waiting = batches._get_iterator()
    (worker,) = waiting._workers
    until(lambda: "\nState:\tT" in Path(f"/proc/{worker.pid}/status").read_text())
    for _ in range(30):
        assert waiting._try_get_data(timeout=0.001) == (False, None)
    waiting._shutdown_workers()
    assert caplog.messages == [
        f"no batch for a minute: loader worker {worker.pid} is stopped "
        f"(`kill -CONT {worker.pid}` lets it go on)"
    ]


class WithoutFiles(Dataset[torch.Tensor]):
    """Its worker can open no more files."""

    processes = ()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        batch = torch.ones(1).share_memory_()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        return batch


def test_a_worker_with_too_many_open_files_is_one_message(monkeypatch, capfd):
    monkeypatch.setattr(loader, "_DEATH_SECONDS", 0.0)
    batches = loader.Loader(
        WithoutFiles(),
        batch_size=None,
        collate_fn=lambda batch: batch,  # collating would need files, too
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=loader.init_worker,
    )
    with pytest.raises(ValueError, match=r"a loader worker .* `ulimit -n 65536`"):
        list(batches)
    assert "Traceback" not in capfd.readouterr().err


class Lost(Dataset[torch.Tensor]):
    """As a batch of a worker whose own thread cannot accept the connection for it."""

    processes = ()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        raise EOFError


def test_a_batch_that_is_not_handed_over_is_the_users_error(monkeypatch):
    monkeypatch.setattr(loader, "_DEATH_SECONDS", 0.0)
    with pytest.raises(
        ValueError, match=r"did not hand over its batch \(EOFError\).* `ulimit -n 65536` help"
    ):
        list(loader.Loader(Lost()))


class Ones(Dataset[torch.Tensor]):
    processes = ()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


class Looking(Ones):
    """The worker is in the middle of a look at torch's event for its end, whose lock it holds."""

    def __getitem__(self, index: int) -> torch.Tensor:
        frame = sys._getframe()
        while "done_event" not in frame.f_locals:
            frame = frame.f_back
        if index:
            frame.f_locals["done_event"]._cond.acquire()
        return super().__getitem__(index)


def test_a_worker_that_is_killed_with_a_lock_does_not_hold_up_the_end():
    """A test stood still for ten minutes, until its timeout raised an error within `__del__`, unseen."""
    batches = iter(loader.Loader(Looking(), num_workers=1, multiprocessing_context="fork"))
    next(batches)
    workers = batches.gi_frame.f_locals["batches"]
    event = workers._workers_done_event
    until(lambda: _is_held(event._cond))
    end = threading.Thread(target=workers._shutdown_workers, daemon=True)
    end.start()
    end.join(PATIENCE_S)
    assert not end.is_alive() and not any(worker.is_alive() for worker in workers._workers)


def _is_held(lock):
    if lock.acquire(False):
        lock.release()
        return False
    return True


def test_stopped_workers_delay_neither_a_signal_between_epochs_nor_the_end(monkeypatch):
    """torch waits for the answer of each persistent worker, and then at its end for each that is stopped."""
    monkeypatch.setattr(signals, "WAIT_SECONDS", 0.2)
    request = signals.StopRequest()
    request.defer()
    batches = _with_stopped_worker(request)
    with pytest.raises(signals.RunInterrupted), request.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        list(batches)
    (worker,) = batches._iterator._workers
    until(lambda: not is_running(worker.pid))
    batches._iterator._shutdown_workers()  # a second time

    ended = _with_stopped_worker(signals.StopRequest())._iterator
    ended._shutdown_workers()  # as Lightning does
    (worker,) = ended._workers
    worker.join()  # torch does so for 5 seconds at most
    assert worker.exitcode == -signal.SIGKILL
    assert worker not in multiprocessing.active_children()  # for which Python waits when it exits


def _with_stopped_worker(request):
    """A loader after its first epoch, with an idle worker that is stopped."""
    batches = loader.Loader(
        Ones(),
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=loader.init_worker,
        persistent_workers=True,
        stop_request=request,
    )
    assert len(list(batches)) == 2
    os.kill(batches._iterator._workers[0].pid, signal.SIGSTOP)
    return batches


def entry(channels, *shape, label=True):
    image = np.zeros((channels, *shape), np.float32)
    no_crop = None
    return Entry(image, np.zeros(shape, np.int16) if label else NOTHING, NOTHING, no_crop)


def test_bytes_count_all_channels_and_the_label_map():
    assert patch_bytes(entry(4, 9, 9), 1000) == 1000 * (4 * 4 + 2)
    assert patch_bytes(entry(3, 9, 9, label=False), 81) == 81 * 3 * 4
    assert largest_case_bytes([entry(1, 9, 9), entry(2, 10, 5)]) == 81 * (4 + 2 * 2)
    assert largest_case_bytes([]) == 0


def test_too_little_room_is_an_error_that_says_what_helps(tmp_path):
    check_room(1000.0, 2, folder=tmp_path)
    check_room(1e18, 0, folder=tmp_path)  # no workers
    check_room(1e18, 2, folder=tmp_path / "absent")
    with pytest.raises(ArgumentError) as caught:
        check_room(1e18, 2, 4, tmp_path)
    message = caught.value.renamed(lambda name: f"data.{name}")
    assert message.startswith("data.num_workers=2 in each of 4 processes: the batches")
    assert f"need about 8000000000.0 GB in {tmp_path}" in message
    assert "docker run --shm-size=" in message
    assert message.endswith("or a smaller data.prefetch_factor or data.batch_size")
