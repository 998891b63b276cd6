"""A loader whose workers leave signals to the main process, end with it, and hand their errors to it.

Batches come through shared memory: `check_room` compares what they need with what there is.
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, process, queues, resource_tracker
from pathlib import Path
from typing import Any

from monai.data import DataLoader
from threadpoolctl import threadpool_limits
from torch.utils.data import Sampler as TorchSampler
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from medconv.data.loading.worker_errors import WorkerError, doing
from medconv.data.preprocessing.preprocess import Entry
from medconv.performance.step_profiler import StepProfiler
from medconv.utils.atomic_io import TOO_MANY_FILES
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.hardware import keep_freed_memory
from medconv.utils.signals import PREEMPTING, RunInterrupted, StopRequest

# What a terminal and Slurm send to all processes of a run
_RUN_SIGNALS = {signal.SIGINT, *PREEMPTING}
_LONG_WAIT = 60 // MP_STATUS_CHECK_INTERVAL  # torch looks for a batch every 5 seconds
_DEATH_SECONDS = 10.0  # at most, from the loss of a worker's connection to the end of its process

SHARED = Path("/dev/shm")

log = logging.getLogger(__name__)


class Loader(DataLoader):
    """Marks the begin and end of waiting for a batch; raises the errors of workers.

    It is MONAI's loader, which seeds random transforms of MONAI where there are no workers.

    Args:
        stop_request: ends a wait for a batch that does not come.
        ends_early: at the first batch after a stop was requested.
    Raises:
        RunInterrupted: the wait was ended.
    """

    def __init__(
        self,
        *arguments: Any,
        profiler: StepProfiler | None = None,
        stop_request: StopRequest | None = None,
        ends_early: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.profiler = profiler or StepProfiler()
        self.stop_request = stop_request or StopRequest()
        self.ends_early = ends_early

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        batches = self._batches()
        self.dataset.processes = getattr(batches, "_workers", ())  # type: ignore[attr-defined]
        while not (self.ends_early and self.stop_request.number):
            self.profiler.mark("logging")
            try:
                with self.stop_request.waiting():
                    batch = next(batches)
            except StopIteration:
                return
            except RunInterrupted:
                _kill_workers(batches)
                raise
            except (ConnectionError, EOFError) as error:
                _raise_end_of_worker(batches)
                raise WorkerError.lost(error).error() from error
            self.profiler.mark("data_wait")
            if isinstance(batch, WorkerError):
                raise batch.error()
            yield batch

    def _batches(self) -> Any:
        """torch's iterator over batches; that of persistent workers begins anew, once each has answered."""
        if not self.num_workers:
            return super().__iter__()
        if self._iterator is None:
            with _blocked_signals():
                return super().__iter__()
        try:
            with self.stop_request.waiting():
                return super().__iter__()
        except RunInterrupted:
            _kill_workers(self._iterator)
            raise

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        self.check_worker_number_rationality()  # warns, as in torch's method
        return _Batches(self)


class _Batches(_MultiProcessingDataLoaderIter):
    """torch's iterator, which ends workers that are stopped or hang, too.

    torch waits 10 s for each of them, and Python at its exit for ever. After a minute without a batch, a
    warning says what the worker does that should send it.
    """

    _looks = 0  # for a batch, without one

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        success, batch = super()._try_get_data(timeout)
        self._looks = 0 if success else self._looks + 1
        if self._looks == _LONG_WAIT:
            log.warning("no batch for a minute: %s", "; ".join(doing(pid) for pid in self._awaited()))
        return success, batch

    def _awaited(self) -> list[int]:
        """Process ids of the worker with the next batch, or of all when an epoch begins."""
        task = self._task_info.get(self._rcvd_idx)
        workers = self._workers if task is None else [self._workers[task[0]]]
        return [worker.pid for worker in workers if worker.pid is not None]

    def _shutdown_workers(self) -> None:
        if not self._shutdown:
            _kill_workers(self)
            # A worker that was killed as it looked at torch's event holds its lock for ever, and torch would
            # wait for that lock to tell workers that are gone
            self._workers_done_event = threading.Event()  # type: ignore[assignment]
        super()._shutdown_workers()


class SampleOrder(TorchSampler[int]):
    """The sample numbers of one rank, epoch by epoch.

    A global batch is `batch_size * world_size` consecutive numbers, of which each rank takes its own
    `batch_size`: two devices with batch 2 see what one device with batch 4 sees. An epoch is the smallest
    number of whole global batches with at least `samples_per_epoch` samples.

    Attributes:
        first_batch: at which the next epoch begins, if a run resumes within it; later ones are complete.
    """

    def __init__(self, samples_per_epoch: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first_batch = 0
        global_batch_size = batch_size * world_size
        self.batches = -(-samples_per_epoch // global_batch_size)  # rounded up

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        first_of_epoch = self.epoch * self.batches
        first_batch = first_of_epoch + self.first_batch
        self.first_batch = 0
        for batch in range(first_batch, first_of_epoch + self.batches):
            first_sample = (batch * self.world_size + self.rank) * self.batch_size
            yield from range(first_sample, first_sample + self.batch_size)


def _raise_end_of_worker(batches: Any) -> None:
    """Raise torch's error of an ended worker, if one ended while it sent a batch.

    torch raises it from the handler of a signal, which comes late on a busy machine, or is lost where an
    exception is ignored.

    Raises:
        RuntimeError: a worker ended.
    """
    if not isinstance(batches, _Batches):  # the main process reads itself
        return
    ended = connection.wait([worker.sentinel for worker in batches._workers], _DEATH_SECONDS)
    for worker in batches._workers:
        if worker.sentinel in ended:
            worker.join()  # a moment, until its exit code is known
            raise RuntimeError(f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly")


def _kill_workers(batches: Any) -> None:
    """Kill workers, which have nothing left to write, whether they are idle, stopped or hang."""
    if not isinstance(batches, _Batches):  # the main process reads itself
        return
    if batches._worker_pids_set:  # else torch reports their death as an error
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False
    for worker in batches._workers:
        worker.kill()
        process._children.discard(worker)  # type: ignore[attr-defined]  # a dead disk holds even killed ones


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Processes started inside inherit a mask that blocks the run's signals in all of their threads.

    Blocking in the worker would be too late for threads that libraries have already started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
    try:
        # Otherwise `spawn` starts it, and then removes SIGINT and SIGTERM from the mask.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def init_worker(worker: int) -> None:
    """One thread per worker, also in numpy and scipy; objects of the main process are not garbage-collected.
    It keeps no more freed memory than other processes do.

    A collection writes to every object, which would copy their memory pages into each worker. Workers ignore
    the signals of a terminal or Slurm: the main process handles them and still needs its workers.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)  # first: threads inherit it, also those of BLAS
    threadpool_limits(1)  # torch's own threads are capped by its worker loop
    gc.freeze()
    keep_freed_memory(2**25, 2**26)
    sys.excepthook = _except_lost_connections
    queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _send_error(queue: Any, error: Exception, batch: Any) -> None:
    """Send the error in place of a batch that cannot be sent.

    Python drops it and prints a traceback, and the main process would wait for it forever.
    """
    if isinstance(batch, tuple):  # else the main process no longer reads
        index, _ = batch
        queue.put((index, WorkerError.unsent(error)))


def _except_lost_connections(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback, but not that of the thread which hands over batches if the main process stopped
    receiving, or if files run out: that process says why, such as the death of another worker.
    """
    lost_connection = issubclass(kind, ConnectionError | EOFError)
    lacks_files = isinstance(error, OSError) and error.errno in TOO_MANY_FILES
    if not (lost_connection or lacks_files) and "did not receive acknowledgement" not in str(error):
        sys.__excepthook__(kind, error, trace)


def _end_with_parent() -> None:
    """End the worker on SIGTERM from the main process (which so ends a hanging worker), from nobody else.

    Workers also end when the main process is gone; torch detects that only if it started them itself.
    """
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, 5.0)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)


def patch_bytes(entry: Entry, voxels: float) -> float:
    """The size of a training sample of so many voxels, with its label. Args: entry: any prepared case."""
    per_voxel = len(entry.image) * entry.image.itemsize
    if entry.label.size:
        label = entry.training_label
        per_voxel += len(label) * label.itemsize
    return voxels * per_voxel


def largest_case_bytes(entries: Iterable[Entry]) -> int:
    """The size of the largest case for validation; its original reference is a second label map."""
    return max(
        (entry.image.nbytes + entry.training_label.nbytes + entry.label.nbytes for entry in entries),
        default=0,
    )


def check_room(worker_bytes: float, num_workers: int, processes: int = 1, folder: Path = SHARED) -> None:
    """Check that the batches which workers keep ready fit.

    Without this check, torch loses a batch when the memory is full, and the training waits for it forever.

    Args:
        worker_bytes: of the batches that each worker keeps ready.
        processes: of this machine, each with `num_workers` workers.
    Raises:
        ArgumentError: they do not fit.
    """
    if not num_workers or not folder.is_dir():  # macOS has other shared memory
        return
    file_system = os.statvfs(folder)
    free = file_system.f_bavail * file_system.f_frsize
    needed = worker_bytes * num_workers * processes
    if needed <= free:
        return
    workers = f"={num_workers}" if processes == 1 else f"={num_workers} in each of {processes} processes"
    gigabytes = int(2 * needed / 2**30) + 1  # twice as much, for what else uses it; rounded up
    raise ArgumentError(
        "num_workers",
        f"{workers}: the batches that they keep ready need about {_size(needed)} in {folder}, and "
        f"{_size(free)} are free. A container gets more by `docker run --shm-size={gigabytes}g`; or "
        "take fewer workers, or a smaller ",
        Argument("prefetch_factor"),
        " or ",
        Argument("batch_size"),
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
