"""medconv/utils/logging.py: messages for people, on the console and in a run's log."""

import errno
import logging
import threading

import pytest
from helpers.launchers import launch
from hydra.errors import HydraException
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medconv.config import data_of
from medconv.utils.logging import log_into, logging_of_a_call, message, shown, size_text, some, start_logging

log = logging.getLogger("medconv")


@pytest.fixture(autouse=True)
def thread_hook():
    hook = threading.excepthook
    yield
    threading.excepthook = hook


def test_messages_name_the_key_first():
    with pytest.raises(OmegaConfBaseException) as error:
        data_of(OmegaConf.create({"data": {"batch_size": "many"}}))
    assert message(error.value).startswith("data.batch_size: Value 'many'")
    assert "object_type" not in message(error.value)
    with pytest.raises(OmegaConfBaseException) as error:
        data_of(OmegaConf.create({"data": {"spacing_mm": 1}}))
    assert message(error.value) == "data.spacing_mm: expected a list, such as [1,2]"


def test_messages_of_hydra_leave_out_where_it_searched():
    text = "Could not find 'model/x'\n\nAvailable options in 'model':\n\tunet\nConfig search path:\n\tpkg"
    assert message(HydraException(text)) == "Could not find 'model/x' Available options in 'model': unet"


def test_an_error_without_a_text_is_named_by_its_class():
    assert message(ValueError()) == "ValueError"
    assert message(ValueError(" two\nlines ")) == "two\nlines"


def test_control_characters_are_spelled_out():
    assert shown("Größe\t1\n") == "Größe\t1\n"
    assert shown("\x1b[31mred\ud800") == "\\x1b[31mred\\ud800"


def test_long_lists_are_cut():
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c"], max_items=2) == "a, b and 1 more"


def test_sizes_along_axes():
    assert size_text((0.46875, 0.5, 7.5)) == "0.46875 x 0.5 x 7.5"
    assert size_text([0.46875, 128], digits=3) == "0.469 x 128"


def test_the_file_also_gets_earlier_messages(tmp_path, capsys):
    start_logging()
    log.debug("before")
    log_into(tmp_path / "train.log")
    log.warning("after")
    assert capsys.readouterr().out == "warning: after\n"
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert lines[-1].endswith("WARNING medconv: after")
    assert any(line.endswith("DEBUG medconv: before") for line in lines[:-1])


def test_other_ranks_only_print_errors(capsys):
    start_logging(rank_zero=False)
    log.warning("from every rank")
    log.error("from this rank")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: from this rank\n")


def test_an_srun_that_is_there_and_not_used_is_no_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    launch(monkeypatch)
    with logging_of_a_call():
        SLURMEnvironment.detect()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_thread_whose_disk_is_full_or_fails_prints_no_traceback(number, capsys):
    start_logging()

    def fail(error):
        raise error

    for error in (OSError(number, "no disk"), ValueError("a bug")):
        thread = threading.Thread(target=fail, args=(error,))
        thread.start()
        thread.join()
    traces = capsys.readouterr().err
    assert "ValueError: a bug" in traces and "no disk" not in traces


def test_the_table_of_a_profiler_is_printed_and_kept(tmp_path, capsys):
    """It is an information of Lightning's, whose others stay silent."""
    profiler = SimpleProfiler()
    with logging_of_a_call():
        log_into(tmp_path / "train.log")
        with profiler.profile("a step"):
            logging.getLogger("lightning.pytorch").info("a tip")
        profiler.describe()
        assert not logging.getLogger("lightning").handlers  # its own would print the table once more
    assert capsys.readouterr().out.count("a step") == 1
    text = (tmp_path / "train.log").read_text()
    assert "a step" in text and "a tip" not in text
