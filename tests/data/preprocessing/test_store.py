"""medconv/data/preprocessing/store.py: entries are complete or absent, and damage is found."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.restoring import restore
from helpers.stores import (
    ARRAYS,
    assert_complete,
    before_each_file,
    change_a_byte,
    change_a_byte_unnoticed,
    rewritten,
    times,
    touch,
)
from helpers.tiny import train as train_tiny
from helpers.volumes import (
    image_array,
    label_array,
    preprocessing_config,
    save,
    tiny,
    truncate,
    unprivileged,
    write_msd,
)
from lightning import Callback
from torch.nn.functional import one_hot

from medconv.data.datasets.dataset_json import msd
from medconv.data.loading.patch_dataset import CaseDataset
from medconv.data.preprocessing import dataset_cache
from medconv.data.preprocessing import store as store_module
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.preprocess import preprocess_case
from medconv.data.preprocessing.store import Store, StoreCheck, _save

CASES = ["case_0", "case_1", "case_2"]


def test_an_entry_is_read_as_it_was_written(tmp_path):
    dataset = tiny(tmp_path / "data", 1)
    (case,) = dataset.cases
    store, entry = Store(tmp_path / "store"), preprocess_case(case, preprocessing_config(), 3)
    assert not store.has(case)
    store.write(case, entry)
    assert store.has(case)
    read = store.read(case.id)
    for name in ARRAYS:
        array = getattr(read, name)
        assert isinstance(array.base, mmap) and not array.flags.writeable
        np.testing.assert_array_equal(array, getattr(entry, name))
    assert read.crop_info == entry.crop_info
    assert hash(read.crop_info)  # tuples, not the lists of JSON
    logits = one_hot(torch.from_numpy(read.label.astype(np.int64)), 3).movedim(-1, 0).float()
    np.testing.assert_array_equal(restore(logits, read.crop_info), label_array(0))


DAMAGES = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: truncate(path, 0.9),
    "garbage": lambda path: path.write_bytes(b"x" * 4000),
}


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "foreground.npy", "json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_reading_a_damaged_entry_names_its_case(tmp_path, damage, name):
    store = fill_store(tiny(tmp_path / "data", 1), preprocessing_config(), tmp_path / "cache", 1)
    DAMAGES[damage](store.folder / f"case_0.{name}")
    with pytest.raises(
        ValueError,
        match=rf"^case case_0: its prepared files in {store.folder} cannot be read \(.*\); run again to rebuild",
    ):
        store.read("case_0")


def test_a_reader_never_sees_half_an_entry(tmp_path):
    """A case that is being replaced has no record, so a record never describes other arrays."""
    dataset = tiny(tmp_path / "data", 1)
    (case,) = dataset.cases
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    steps = []
    with before_each_file(lambda path: steps.append((path.name, store.has(case)))):
        store.write(case, preprocess_case(case, preprocessing_config(), 3))
    assert steps == [(f"case_0.{n}", False) for n in ("image.npy", "label.npy", "foreground.npy", "json")]
    assert store.has(case)


def test_partial_files_of_a_killed_writer_are_removed(tmp_path):
    """Not a case whose name begins with a dot."""
    dataset = msd(write_msd(tmp_path / "raw"))
    first, *others = dataset.cases
    dataset = replace(dataset, cases=(replace(first, id=".a.b"), *others))
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    partial, written = store.folder / ".4711.case_1.image.npy", sorted(store.folder.glob(".a.b.*.npy"))
    partial.write_bytes(b"half")
    store._record_path(others[0].id).unlink()
    fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert written and sorted(store.folder.glob(".*.npy")) == written
    assert_complete(store, dataset)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "O"},
        {"dtype": "<f8"},
        {"offset": -(1 << 30)},
        {"offset": 1 << 30},
        {"shape": [1, -1, -1, 1]},
        {"shape": [1, 4, 4, 4]},
        {"shape": [1680]},
        {"shape": "1"},
        {"shape": None},
        {"dtype": 5},
    ],
)
def test_a_record_that_does_not_match_its_file_is_an_error(tmp_path, change):
    """Anybody can compute a record's checksum, so its values are compared with the file."""
    (case,) = (dataset := tiny(tmp_path / "data", 1)).cases
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    record = store._record(case.id)
    record["arrays"]["image"] |= change
    store._commit(case.id, record)
    with pytest.raises(ValueError, match=r"^case case_0: its prepared files in .* cannot be read \("):
        store.read(case.id)


def test_arrays_of_different_cases_are_an_error(tmp_path):
    (case,) = (dataset := tiny(tmp_path / "data", 1)).cases
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    record = store._record(case.id)
    record["arrays"]["label"] = _save(
        store._array_path(case.id, "label", False), np.zeros((4, 4, 4), np.uint8)
    )
    store._commit(case.id, record)
    with pytest.raises(ValueError, match="do not belong together"):
        store.read(case.id)


def test_folders_of_others_stay_in_the_store(tmp_path):
    dataset = tiny(tmp_path / "data", 2)
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    (store.folder / ".snapshot.of.today").mkdir()
    (store.folder / ".77.case_0.json").write_text("left behind")
    store._record_path("case_0").unlink()
    fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert (store.folder / ".snapshot.of.today").is_dir() and not (store.folder / ".77.case_0.json").exists()
    assert store.has(dataset.cases[0])


@pytest.mark.parametrize("which", ["images", "labels", "time alone"])
def test_only_the_case_of_a_changed_file_is_prepared_again(tmp_path, which):
    dataset = tiny(tmp_path / "data")
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    before = times(store)
    case = dataset.cases[1]
    if which == "images":
        save(case.images[0], image_array(5) * 3)
    elif which == "labels":
        save(case.files[-1], label_array(2))
    touch(case.files[-1 if which == "labels" else 0])
    assert not store.has(case)
    fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert rewritten(store, before) == {"case_1"}
    assert_complete(store, dataset)


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "foreground.npy", "json"])
@pytest.mark.parametrize("damage", [truncate, change_a_byte, Path.unlink])
def test_a_damaged_entry_is_prepared_again(tmp_path, name, damage):
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = fill_store(dataset, preprocessing_config(), cache, 2)
    before = times(store)
    damage(store.folder / f"case_1.{name}")
    assert [store.has(case) for case in dataset.cases] == [True, False, True]
    fill_store(dataset, preprocessing_config(), cache, 2)
    assert rewritten(store, before) == {"case_1"}
    assert_complete(store, dataset)


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "foreground.npy"])
def test_damage_that_keeps_size_and_time_is_found_in_a_small_store_and_by_verify(tmp_path, name, monkeypatch):
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = fill_store(dataset, preprocessing_config(), cache, 1)
    before = times(store)
    change_a_byte_unnoticed(store.folder / f"case_2.{name}")
    with monkeypatch.context() as patched:
        patched.setattr(dataset_cache, "_VERIFIED_AT_START", 0)  # as if the store were large
        fill_store(dataset, preprocessing_config(), cache, 1)
        assert rewritten(store, before) == set()
        fill_store(dataset, preprocessing_config(), cache, 1, verify=True)
        assert rewritten(store, before) == {"case_2"}
    before = times(store)
    change_a_byte_unnoticed(store.folder / f"case_1.{name}")
    fill_store(dataset, preprocessing_config(), cache, 1)
    assert rewritten(store, before) == {"case_1"}
    assert_complete(store, dataset)


@pytest.mark.parametrize("name", ["image", "label"])
def test_validation_finds_damage_that_keeps_size_and_time(tmp_path, name):
    dataset = tiny(tmp_path)
    store = fill_store(dataset, preprocessing_config(), tmp_path / "store", 1)
    case = dataset.cases[1]
    change_a_byte_unnoticed(store.folder / f"{case.id}.{name}.npy")
    assert store.has(case)
    cases = CaseDataset(store, dataset.cases)
    assert cases[0]["case"] == dataset.cases[0].id
    with pytest.raises(ValueError, match=f"case {case.id}: .*the checksum of {name} is wrong"):
        cases[1]
    assert not store.has(case)  # the next start prepares it anew
    fill_store(dataset, preprocessing_config(), tmp_path / "store", 1)
    assert CaseDataset(store, dataset.cases)[1]["case"] == case.id


def test_a_copied_store_is_read_once_and_not_prepared_again(tmp_path):
    """Copied files have new times: the checksums are compared once, and the new times stored."""
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = fill_store(dataset, preprocessing_config(), cache, 1)
    shutil.copytree(cache, tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (tmp_path / "copy").rglob("*.npy"):
        os.utime(path, ns=(1, 1_000_000_000))
    copy = Store(tmp_path / "copy" / store.folder.name)
    before = times(copy)
    assert fill_store(dataset, preprocessing_config(), tmp_path / "copy", 1).folder == copy.folder
    changed = {name for name, time in times(copy).items() if before[name] != time}
    assert changed == {f"case_{i}.json" for i in range(3)}
    before = times(copy)
    fill_store(dataset, preprocessing_config(), tmp_path / "copy", 1)
    assert rewritten(copy, before) == set()
    change_a_byte(copy.folder / "case_0.image.npy")
    fill_store(dataset, preprocessing_config(), tmp_path / "copy", 1)
    assert rewritten(copy, before) == {"case_0"}
    assert_complete(copy, dataset)


def test_a_read_only_copy_of_a_store_is_used(open_folder):
    dataset = tiny(open_folder / "data", 1)
    store = fill_store(dataset, preprocessing_config(), open_folder / "cache", 1)
    os.utime(store.folder / "case_0.image.npy", ns=(1, 1))

    def look():
        raise ValueError(store.has(dataset.cases[0]))

    assert unprivileged(look) == "ValueError: True"


def test_entries_of_another_config_are_not_used(tmp_path):
    dataset, cache = tiny(tmp_path / "data", 1), tmp_path / "cache"
    one = fill_store(dataset, preprocessing_config(), cache, 1)
    other = fill_store(dataset, preprocessing_config(normalisation="zscore"), cache, 1)
    for path in other.folder.iterdir():
        shutil.copy2(path, one.folder / path.name)
    assert not one.has(dataset.cases[0])
    fill_store(dataset, preprocessing_config(), cache, 1)
    assert_complete(one, dataset)


@pytest.fixture
def store(tmp_path):
    return fill_store(tiny(tmp_path / "data"), preprocessing_config(), tmp_path / "cache", 1)


def checked(store, step=0):
    """A check that has read all cases."""
    check = StoreCheck(store, CASES)
    check.go_on(step)
    end_of(check)
    return check


def end_of(check):
    assert check._thread is not None
    check._thread.join()


@pytest.mark.parametrize("name", ["image", "label", "foreground"])
def test_a_damaged_case_is_named_and_prepared_anew(tmp_path, store, name):
    checked(store).go_on(1)  # no damage
    change_a_byte_unnoticed(store.folder / f"case_1.{name}.npy")
    check = checked(store)
    with pytest.raises(ValueError, match=f"case case_1: .*the checksum of {name} is wrong.*run again"):
        check.go_on(1)
    assert not (store.folder / "case_1.json").exists()


def test_the_step_decides_the_first_case(store, monkeypatch):
    cases = []
    monkeypatch.setattr(Store, "verify", lambda self, case: cases.append(case) or [])
    checked(store, step=7)
    assert cases == ["case_1", "case_2", "case_0"]


def test_it_takes_a_small_share_of_the_time(store, monkeypatch):
    """It waits 49 times as long as each block took."""
    waits = []
    seconds = iter(range(0, 100, 2))
    check = StoreCheck(store, CASES)
    monkeypatch.setattr(check._stopped, "wait", waits.append)
    monkeypatch.setattr(Store, "verify", lambda self, case: [None])
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=seconds.__next__))
    check.go_on(0)
    end_of(check)
    assert waits == pytest.approx([98.0] * 3)


def test_a_stop_ends_the_check_within_a_case_and_does_not_wait_for_the_disk(store, monkeypatch):
    cases = []
    answer = threading.Event()  # of the disk

    def verify(self, case):
        cases.append(case)
        answer.wait()
        yield

    check = StoreCheck(store, CASES)
    monkeypatch.setattr(Store, "verify", verify)
    check.go_on(0)
    check.stop()
    answer.set()
    end_of(check)
    assert cases == ["case_0"]
    check.go_on(1)


class AfterTheCheck(Callback):
    """The second step begins once all cases were read."""

    def on_train_batch_end(self, trainer: object, *args: object) -> None:
        trainer.datamodule._check._thread.join()


def test_a_run_ends_and_the_next_one_prepares_the_case_anew(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_cache, "_VERIFIED_AT_START", 0)  # as if the store were large
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    wait = f"+callbacks.wait._target_={__name__}.AfterTheCheck"
    train_tiny(dataset, tmp_path / "first", cache)
    (image,) = (tmp_path / "cache").glob("*/*/case_1.image.npy")
    change_a_byte_unnoticed(image)
    with pytest.raises(ValueError, match="case case_1: .*the checksum of image is wrong"):
        train_tiny(dataset, tmp_path / "run", cache, wait, "trainer.max_steps=4")
    assert train_tiny(dataset, tmp_path / "run", cache, wait, "trainer.max_steps=4")["status"] == "done"
