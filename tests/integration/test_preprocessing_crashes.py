"""Preprocessing that is killed, runs out of disk space, or runs in several processes at once."""

import os
import re
import resource
import shutil
import signal
import time

import pytest
from helpers.small_disk import FORK, on_small_disk
from helpers.stores import assert_complete, before_each_file, rewritten, times
from helpers.volumes import preprocessing_config, write_msd
from helpers.waiting import PATIENCE_S

from medconv.data.datasets.dataset_json import msd
from medconv.data.preprocessing import dataset_cache
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, fill_store
from medconv.data.preprocessing.store import Store

FULL = (
    r"case case_(\d): no room in \S+/cache/\w+ \({reason}\): this case needs 1\.\d MB, "
    r"[\d.]+ MB are free; make room, or choose "
)


def _limited(size, call, answers):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        call()
    except ValueError as error:
        answers.put(str(error))


def error_of_limited(size, call):
    """The error of a call in a fork of this process whose files may have so many bytes."""
    answers = FORK.Queue()
    process = FORK.Process(target=_limited, args=(size, call, answers))
    process.start()
    error = answers.get(timeout=PATIENCE_S)
    process.join(timeout=PATIENCE_S)
    return error


def stores(cache):
    return [Store(path) for path in cache.iterdir() if path.is_dir()]


def _prepare_and_report(root, cache, log, start, answers):
    """In a process of its own; writes each check and each case to a log that all processes share."""

    def note(line):
        with log.open("a") as file:
            file.write(line + "\n")

    real_check, real_write = dataset_cache.check, Store.write

    def slow_check(dataset, workers, skip, examine_case):
        note("check")
        time.sleep(0.1)
        return real_check(dataset, workers, skip, examine_case)

    def slow_write(self, case, entry, sources):
        note(case.id)
        time.sleep(0.1)
        real_write(self, case, entry, sources)

    dataset_cache.check, Store.write = slow_check, slow_write
    dataset = msd(root)
    start.wait(timeout=PATIENCE_S)
    measured = cached_fingerprint(dataset, cache, 1)
    store = fill_store(dataset, preprocessing_config(), cache, 1)
    answers.put((measured, all(store.has(case) for case in dataset.cases)))


@pytest.mark.parametrize("are_ranks", [False, True])
def test_concurrent_processes_do_the_work_once(are_ranks, tmp_path, monkeypatch):
    """Processes of one run take turns on a machine, others share the cases."""
    if are_ranks:
        monkeypatch.setenv("LOCAL_RANK", "0")
    write_msd(tmp_path / "data")
    cache, log = tmp_path / "cache", tmp_path / "log"
    start, answers = FORK.Barrier(3), FORK.Queue()
    arguments = (tmp_path / "data", cache, log, start, answers)
    processes = [FORK.Process(target=_prepare_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    fingerprints, complete = zip(*[answers.get(timeout=PATIENCE_S) for _ in processes], strict=True)
    for process in processes:
        process.join(timeout=PATIENCE_S)
        assert process.exitcode == 0
    assert sorted(log.read_text().split()) == ["case_0", "case_1", "case_2", "check"]
    assert all(complete)
    assert fingerprints[0] == fingerprints[1] == fingerprints[2]
    (store,) = stores(cache)
    assert_complete(store, msd(tmp_path / "data"))


def _prepare_until(root, cache, fatal):
    """Dies by SIGKILL before the file `fatal` is in place."""
    with before_each_file(lambda path: os.kill(os.getpid(), signal.SIGKILL) if path.name == fatal else None):
        fill_store(msd(root), preprocessing_config(), cache, 1)


@pytest.mark.parametrize("fatal", ["case_1.json", "case_1.label.npy", "case_2.image.npy"])
def test_a_killed_preparation_is_resumed(tmp_path, fatal):
    root, cache = write_msd(tmp_path / "data"), tmp_path / "cache"
    process = FORK.Process(target=_prepare_until, args=(root, cache, fatal))
    process.start()
    process.join(timeout=PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    dataset = msd(root)
    (store,) = stores(cache)
    number = int(fatal[5])
    assert [store.has(case) for case in dataset.cases] == [i < number for i in range(3)]
    done = {f"case_{i}" for i in range(number)}
    before = {name: time for name, time in times(store).items() if name.split(".")[0] in done}
    assert fill_store(dataset, preprocessing_config(), cache, 1).folder == store.folder
    assert rewritten(store, before).isdisjoint(done)
    assert_complete(store, dataset)


def test_a_full_disk_is_named_and_the_next_start_resumes(tmp_path):
    """A disk of 4 MB holds three cases of 1.25 MB each; then its files are copied to a larger one."""
    root, cache = write_msd(tmp_path / "data", 5, shape=(64, 64, 64)), tmp_path / "cache"

    def prepare():
        with pytest.raises(ValueError) as raised:
            fill_store(msd(root), preprocessing_config(), cache, 1)
        (tmp_path / "error").write_text(str(raised.value))
        shutil.copytree(cache, tmp_path / "saved")

    on_small_disk(cache, "4m", prepare)
    error = (tmp_path / "error").read_text()
    match = re.match(FULL.format(reason="No space left on device"), error)
    assert match and int(match[1]) in (2, 3), error
    (store,) = stores(tmp_path / "saved")
    assert not list(store.folder.glob(".*"))  # no partial file
    before = times(store)
    fill_store(msd(root), preprocessing_config(), tmp_path / "saved", 1)
    assert rewritten(store, before) >= {f"case_{i}" for i in range(int(match[1]), 5)}
    after = times(store)
    for i in range(int(match[1])):
        assert after[f"case_{i}.image.npy"] == before[f"case_{i}.image.npy"]
    assert_complete(store, msd(root))


def test_a_file_size_limit_is_named(tmp_path):
    root, cache = write_msd(tmp_path / "data", 2, shape=(64, 64, 64)), tmp_path / "cache"
    error = error_of_limited(500_000, lambda: fill_store(msd(root), preprocessing_config(), cache, 1))
    assert re.match(FULL.format(reason="File too large"), error), error
    store = fill_store(msd(root), preprocessing_config(), cache, 1)
    assert [only.folder for only in stores(cache)] == [store.folder]
    assert_complete(store, msd(root))


def test_no_room_for_the_fingerprint_is_named(tmp_path):
    root, cache = write_msd(tmp_path / "data", 2), tmp_path / "cache"
    error = error_of_limited(100, lambda: cached_fingerprint(msd(root), cache, 1))
    assert error == f"cache_dir: cannot write to {cache} (File too large)"
    assert {path.name for path in cache.iterdir()} == {".lock", "examined.jsonl"}
