"""medconv/training/memory_errors.py: the advice when memory runs out or a loader worker is killed."""

import errno
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from medconv.config import DataConfig
from medconv.data.loading.worker_errors import SharedMemoryFullError
from medconv.training.memory_errors import ERRORS, raise_advice, worker_advice
from medconv.utils.signals import RunInterrupted


@contextmanager
def advised(data):
    """As a run trains."""
    try:
        yield
    except ERRORS as error:
        raise_advice(error, data)
        raise


def test_a_worker_killed_by_sigterm_preempts_the_run():
    with pytest.raises(RunInterrupted), advised(DataConfig()):
        raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Terminated. ")


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50), lambda: bytearray(1 << 60)]
)
def test_failed_allocations_name_the_settings_that_save_memory(allocate):
    expected = (
        r"does not fit into memory.*perf\.activation_checkpointing=pointwise.*data\.batch_size.*\(\S+.*\)$"
    )
    with pytest.raises(ValueError, match=expected), advised(DataConfig()):
        allocate()


def test_a_killed_worker_names_the_settings_of_the_loader():
    data = DataConfig(num_workers=4, batch_size=8, patch_size=[96, 96, 96])
    with pytest.raises(ValueError, match=r"data\.patch_size \(now \[96, 96, 96\]\)"), advised(data):
        raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")


def test_full_shared_memory_names_what_helps():
    data = DataConfig(num_workers=4)
    with pytest.raises(ValueError, match=r"--shm-size=8g.*data\.num_workers \(now 4\)"), advised(data):
        raise SharedMemoryFullError("no shared memory left for a batch")


def test_too_many_open_files_are_named_by_their_number():
    """torch raises an error of its own in the context of the system's."""
    message = r"^too many open files; `ulimit -n 65536` permits more, or fewer .*data\.num_workers \(now 4\)"
    with pytest.raises(ValueError, match=message), advised(DataConfig(num_workers=4)):
        try:
            raise OSError(errno.EMFILE, "in any language")
        except OSError:
            raise RuntimeError("Communication with the workers is no longer possible") from None


def test_advice_fits_the_signal():
    data = DataConfig(num_workers=4, batch_size=8, patch_size=[96, 96, 96])
    assert "/dev/shm" in worker_advice(1, "SIGBUS", data)
    assert "data.patch_size (now [96, 96, 96])" in worker_advice(1, "SIGKILL", data)
    planned = DataConfig(num_workers=4, batch_size=8)
    assert "data.patch_size; or" in worker_advice(1, "SIGKILL", planned)
    crashed = "loader worker 1 was ended by SIGSEGV: a library crashed"
    assert worker_advice(1, "SIGSEGV", data).startswith(crashed)


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), advised(DataConfig()):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
