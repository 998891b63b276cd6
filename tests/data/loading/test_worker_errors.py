"""medconv/data/loading/worker_errors.py: errors and deaths of loader workers are one message with the case."""

import contextlib
import faulthandler
import os
import re
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import ranks, tiny
from helpers.loading import data_module
from helpers.volumes import preprocessing_config
from helpers.volumes import tiny as tiny_dataset
from helpers.waiting import PATIENCE_S
from threadpoolctl import threadpool_limits

from medconv.data.loading import loader as loader_module
from medconv.data.loading import worker_errors
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.utils.exit_codes import USER


def end_by(name):
    """End this worker by a signal, without the traceback of a crash that pytest would print."""
    faulthandler.disable()
    os.kill(os.getpid(), getattr(signal, name))


class Failing:
    """An augmentation that fails at one sample.

    Args: how: an exception, a signal or `exit`. ignored: what the config of another augmentation has.
    """

    reads = False  # whether it fails while the sample is read

    def __init__(self, sample: int, how: str, **ignored: Any) -> None:
        self.sample, self.how = sample, how

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.sample in batch["sample"].tolist() and not self.reads:
            if self.how.startswith("SIG"):
                end_by(self.how)
            if self.how == "SIGTERM":
                return batch
            if self.how == "exit":
                os._exit(3)
            kinds = {"ValueError": ValueError, "TypeError": TypeError, "MemoryError": MemoryError}
            raise kinds[self.how]("the rotation went wrong")
        return batch


class FailingRead(Failing):
    reads = True

    def read_size(self, sample: int) -> tuple[int, ...]:
        if sample == self.sample:
            end_by(self.how)
        return (16, 16, 12)


def module(folder, augment, workers):
    dataset = tiny_dataset(folder / "data", 3)
    store = fill_store(dataset, preprocessing_config(), folder / "cache", 1)
    settings = {"batch_size": 2, "samples_per_epoch": 8, "num_workers": workers}
    return data_module(store, dataset.cases, [], (6, 5, 4), augment, **settings)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind"), [("ValueError", ValueError), ("TypeError", RuntimeError), ("MemoryError", ValueError)]
)
def test_error_in_augmentation_names_sample_and_case(tmp_path, workers, how, kind):
    """A ValueError remains one, as the user's error; other exceptions are bugs."""
    loader = module(tmp_path, Failing(5, how), workers).train_dataloader()
    case = loader.dataset.dataset.case_of(5)
    message = {
        "ValueError": "the rotation went wrong",
        "TypeError": "TypeError: the rotation went wrong",
        "MemoryError": "no memory left in a loader worker (the rotation went wrong); fewer loader workers "
        "or smaller batches help",
    }[how]
    with pytest.raises(kind) as raised:
        list(loader)
    if workers:
        # as the trainer does; left to the garbage collector it takes 10 seconds
        loader._iterator._shutdown_workers()
    assert str(raised.value) == f"case {case} (training sample 5): {message}"
    cause = str(raised.value.__cause__)
    assert "Traceback (most recent call last)" in cause and "in __call__\n    raise kinds[self.how]" in cause


def test_error_of_a_batch_names_its_first_sample_if_none_fails_alone(tmp_path):
    def fail_together(batch):
        if len(batch["sample"]) > 1 and 4 in batch["sample"].tolist():
            raise ValueError("too many")
        return batch

    loader = module(tmp_path, fail_together, 0).train_dataloader()
    with pytest.raises(ValueError, match=r"\(training sample 4\): too many"):
        list(loader)


def command(dataset, folder, how, kind="Failing"):
    """Exit code and standard error of a run with two workers, one of which fails at sample 5."""
    augment = [
        f"augmentation._target_=tests.data.loading.test_worker_errors.{kind}",
        "+augmentation.sample=5",
        f"+augmentation.how={how}",
    ]
    arguments = [*tiny.overrides(dataset), "data.num_workers=2", f"run.dir={folder}", *augment]
    ended = ranks.run(*arguments, cwd=folder.parent, number=1)
    return ended.codes[0], ended.stderr[0]


def test_user_error_is_one_message_and_its_traceback_is_in_the_log(dataset, tmp_path):
    code, stderr = command(dataset, tmp_path / "run", "ValueError")
    assert code == USER, stderr
    lines = [line for line in stderr.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1 and lines[0].startswith("error: case case_"), stderr
    assert lines[0].endswith("(training sample 5): the rotation went wrong")
    log = (tmp_path / "run/train.log").read_text()
    assert "ValueError: the rotation went wrong" in log and "in __call__" in log and "Traceback" in log


def test_killed_worker_is_one_message_with_its_case_and_advice(dataset, tmp_path):
    """Killed by the signal of the out-of-memory killer, while it reads."""
    code, stderr = command(dataset, tmp_path / "run", "SIGKILL", "FailingRead")
    assert code == USER, stderr
    assert "Traceback" not in stderr and stderr.count("error:") == 1, stderr
    message = (
        r"error: loader worker \d+ was ended by SIGKILL while reading case case_\d \(training "
        r"sample 5\), most likely because"
    )
    assert re.search(message, stderr), stderr
    assert "data.num_workers (now 2)" in stderr and "data.prefetch_factor (now 2)" in stderr


@pytest.mark.parametrize(
    ("kind", "how", "ended_by"),
    [
        (Failing, "SIGKILL", "SIGKILL"),
        (Failing, "exit", "exit code 3"),
        (FailingRead, "SIGKILL", "SIGKILL"),
        (FailingRead, "SIGSEGV", "SIGSEGV"),
    ],
)
def test_advice_names_the_end_and_the_task_of_a_dead_worker(tmp_path, kind, how, ended_by):
    augment = kind(5, how) if kind is Failing else Small(5, how)
    data = module(tmp_path, augment, 2)
    loader = data.train_dataloader()
    samples = [f"case {loader.dataset.dataset.case_of(n)} (training sample {n})" for n in (4, 5)]
    with pytest.raises(RuntimeError) as raised:
        list(loader)
    with contextlib.suppress(RuntimeError):  # of the other worker, which torch ends too
        loader._iterator._shutdown_workers()
    ended = worker_errors.ended_worker(raised.value)
    assert ended is not None and ended[1] == ended_by
    doing = f"while augmenting {', '.join(samples)}" if kind is Failing else f"while reading {samples[1]}"
    assert worker_errors.description(*ended) == f"loader worker {ended[0]} was ended by {ended_by} {doing}"


class Small(FailingRead):
    """For the images of `helpers.volumes.tiny`."""

    def read_size(self, sample: int) -> tuple[int, ...]:
        super().read_size(sample)
        return (6, 5, 4)


class EndingWhileSent:
    """An image whose worker ends after the main process lost the connection to it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return end_soon, (os.getpid(),)


def end_soon(pid):
    threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
    raise ConnectionResetError


class Ending:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch if 0 in batch["sample"].tolist() else {**batch, "image": EndingWhileSent()}


def test_a_worker_that_ends_while_it_sends_a_batch_is_named_without_torchs_signal(tmp_path, monkeypatch):
    """The signal comes late on a busy machine, and its error is lost where Python ignores exceptions."""
    monkeypatch.setattr(loader_module, "_DEATH_SECONDS", PATIENCE_S)
    loader = module(tmp_path, Ending(), 1).train_dataloader()
    batches = iter(loader)
    next(batches)  # torch sets its handler with the first workers of the process
    torchs_handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        with pytest.raises(RuntimeError) as raised:
            next(batches)
    finally:
        signal.signal(signal.SIGCHLD, torchs_handler)
    (worker,) = loader.dataset.processes
    assert worker_errors.ended_worker(raised.value) == (worker.pid, "SIGKILL")


class FullSharedMemory:
    """From here on this worker gets no shared memory, as where /dev/shm is full."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        return {**batch, "image": batch["image"] + 1}


@pytest.mark.parametrize(("number", "is_memory"), [(24, False), (28, True), (12, True)])
def test_torchs_error_of_shared_memory_is_told_by_its_number(number, is_memory):
    text = f"unable to open shared memory object </torch_1_2> in read-write mode: any words ({number})"
    error = worker_errors.WorkerError.unsent(RuntimeError(text))
    assert (error.kind is worker_errors.SharedMemoryFullError) == is_memory
    assert ("`ulimit -n 65536`" in error.message) != is_memory


class Unsendable:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "image": lambda: "no process can get this"}


@pytest.mark.parametrize(
    ("augment", "kind", "message"),
    [
        (FullSharedMemory(), worker_errors.SharedMemoryFullError, "no shared memory left for a batch"),
        (Unsendable(), RuntimeError, "a loader worker cannot send its batch: .*lambda"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_an_error(tmp_path, augment, kind, message):
    loader = module(tmp_path, augment, 1).train_dataloader()
    with pytest.raises(kind, match=message):
        list(loader)
    loader._iterator._shutdown_workers()


def test_workers_ignore_sigterm(tmp_path):
    """A cluster sends it to all processes of a job, and the run still needs its workers."""
    loader = module(tmp_path, Failing(5, "SIGTERM"), 2).train_dataloader()
    assert [n for batch in loader for n in batch["sample"].tolist()] == list(range(8))


class CountingThreads:
    """An augmentation that writes how many threads of its worker do not block SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        bit = 1 << (signal.SIGTERM - 1)
        statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
        lines = [line for status in statuses for line in status.splitlines() if line.startswith("SigBlk")]
        reached = sum(not int(line.split()[1], 16) & bit for line in lines)
        (self.folder / str(os.getpid())).write_text(str(reached))
        return batch


def test_threads_of_a_worker_block_sigterm(tmp_path):
    """All but the one that waits for it: /proc shows a signal as not blocked while `sigtimedwait` runs."""
    counts = tmp_path / "counts"
    counts.mkdir()
    with threadpool_limits(2):  # so that numpy's library starts threads in each worker before our code runs
        list(module(tmp_path / "data", CountingThreads(counts), 2).train_dataloader())
    assert [path.read_text() for path in counts.iterdir()] == ["1", "1"]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", (12, "SIGKILL")),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", (12, "SIGKILL")),
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that", (12, "SIGBUS")),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_ended_worker_reads_the_errors_of_torch(message, ended):
    assert worker_errors.ended_worker(RuntimeError(message)) == ended
    outer = RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly")
    outer.__cause__ = RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. ")
    assert worker_errors.ended_worker(outer) == (12, "SIGBUS")
    outer = RuntimeError("DataLoader worker (pid 13) is killed by signal: Terminated. ")
    outer.__context__ = RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")
    assert worker_errors.ended_worker(outer) == (12, "SIGKILL")


def test_a_worker_that_belongs_to_no_dataset_has_no_task():
    assert worker_errors.description(1, "SIGSEGV") == "loader worker 1 was ended by SIGSEGV"
