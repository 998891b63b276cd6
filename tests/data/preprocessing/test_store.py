"""medconv/data/preprocessing/store.py and prepare.py: work is done once, by one process, and what is
broken off is taken up again.
"""

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from helpers.volumes import (
    CLASSES,
    SHAPE,
    edit_json,
    image_array,
    label_array,
    preprocessing_config,
    save,
    tiny,
    truncate,
    unprivileged,
    write_msd,
    write_nnunet,
)

from medconv.data.case import Case, Dataset
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.nnunet import nnunet
from medconv.data.preprocessing import pipeline as preparing
from medconv.data.preprocessing import store as storing
from medconv.data.preprocessing.pipeline import dataset_folder, fingerprint, prepare, prepare_case
from medconv.data.preprocessing.preprocess import preprocess_label, restore
from medconv.data.preprocessing.store import Entry, Store
from medconv.utils import atomic_io

FORK = multiprocessing.get_context("fork")
ARRAYS = ("image", "label", "foreground")


def times(store: Store) -> dict[str, int]:
    """File name to time of change, of everything committed."""
    return {
        path.name: path.stat().st_mtime_ns for path in store.folder.iterdir() if not path.name.startswith(".")
    }


def touch(path: Path) -> None:
    """Change a file's time but not its content."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """Cases that were written anew."""
    assert before.keys() == after.keys()
    return {name.split(".")[0] for name in before if before[name] != after[name]}


def assert_complete(store: Store, dataset: Dataset) -> None:
    for case in dataset.cases:
        assert store.has(case)
        wanted, found = prepare_case(case, preprocessing_config(), len(CLASSES)), store.read(case.id)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        assert found.crop_info == wanted.crop_info


def test_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 1)
    (case,) = dataset.cases
    store, entry = Store(tmp_path / "store"), prepare_case(case, preprocessing_config(), 3)
    assert not store.has(case)
    store.write(case, entry)
    assert store.has(case)
    found = store.read(case.id)
    for name in ARRAYS:
        array = getattr(found, name)
        assert isinstance(array.base, mmap) and not array.flags.writeable
        np.testing.assert_array_equal(array, getattr(entry, name))
    assert found.crop_info == entry.crop_info == store.crop_info(case.id)
    assert hash(found.crop_info)  # tuples all the way down, as they were
    np.testing.assert_array_equal(restore(_one_hot(found.label), found.crop_info), label_array(0))


def _one_hot(label: np.ndarray) -> "object":
    import torch

    return torch.from_numpy(np.stack([label == value for value in range(3)]).astype(np.float32))


def test_what_a_prepared_case_holds(tmp_path: Path) -> None:
    """Image and label as preprocessing has them; `foreground` lists class and position of foreground
    voxels.
    """
    (case,) = nnunet(write_nnunet(tmp_path, 1)).cases
    entry = prepare_case(case, preprocessing_config(channels=2), 3)
    np.testing.assert_array_equal(entry.image, [image_array(0), image_array(0) + 100])
    assert entry.image.dtype == np.float32 and entry.label.dtype == np.uint8
    np.testing.assert_array_equal(entry.label, label_array(0))
    assert (
        entry.foreground.shape == (np.count_nonzero(label_array(0)), 4) and entry.foreground.dtype == np.int32
    )
    for value, *where in entry.foreground:
        assert label_array(0)[tuple(where)] == value
    assert len(np.unique(entry.foreground, axis=0)) == len(entry.foreground)


def test_foreground_is_spread_over_a_large_class(tmp_path: Path) -> None:
    (case,) = tiny(tmp_path, 1).cases
    label = np.ones((30, 30, 30), np.uint8)
    label[0, 0, :3] = 2
    save(case.files[0], image_array(0, (30, 30, 30)))
    save(case.files[1], label)
    found = prepare_case(case, preprocessing_config(), 3).foreground
    big, small = found[found[:, 0] == 1], found[found[:, 0] == 2]
    assert len(big) == 5_000 and len(small) == 3
    assert big[:, 1].min() == 0 and big[:, 1].max() > 25 and abs(big[:, 1].mean() - 14.5) < 3


def test_case_without_foreground(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 1)
    save(dataset.cases[0].files[-1], np.zeros(SHAPE, np.uint8))
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert store.read("case_0").foreground.shape == (0, 4)


def test_entries_are_made_once_and_used_again(tmp_path: Path) -> None:
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = prepare(dataset, preprocessing_config(), cache, 2)
    before = times(store)
    assert set(before) == {
        f"case_{i}.{end}" for i in range(3) for end in ("json", *(f"{n}.npy" for n in ARRAYS))
    }
    assert_complete(store, dataset)
    again = prepare(msd(tmp_path / "data"), preprocessing_config(), cache, 2)
    assert again.folder == store.folder and times(again) == before


@pytest.mark.parametrize("which", ["images", "labels", "time alone"])
def test_a_changed_file_redoes_its_case_alone(tmp_path: Path, which: str) -> None:
    dataset = tiny(tmp_path / "data")
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    before = times(store)
    case = dataset.cases[1]
    if which == "images":
        save(case.images[0], image_array(5) * 3)
    elif which == "labels":
        save(case.files[-1], label_array(2))
    touch(case.files[-1 if which == "labels" else 0])
    assert not store.has(case)
    prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert changed(before, times(store)) == {"case_1"}
    assert_complete(store, dataset)


def test_a_new_case_is_added(tmp_path: Path) -> None:
    """In another folder of the cache or not: the other cases are untouched."""
    dataset = tiny(tmp_path / "data", 3)
    two = Dataset(dataset.name, dataset.cases[:2], dataset.class_names, dataset.modalities)
    store = prepare(two, preprocessing_config(), tmp_path / "cache", 1)
    before = times(store)
    prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    after = times(store)
    assert {name: after[name] for name in before} == before
    assert_complete(store, dataset)


def test_another_recipe_is_another_store(tmp_path: Path) -> None:
    dataset, cache = tiny(tmp_path / "data", 1), tmp_path / "cache"
    made = [
        preprocessing_config(),
        preprocessing_config((1, 1.5, 2.1)),
        preprocessing_config(normalisation="zscore"),
    ]
    stores = [prepare(dataset, r, cache, 1) for r in made]
    renamed = Dataset(dataset.name, dataset.cases, ("background", "one", "two"), dataset.modalities)
    stores.append(prepare(renamed, preprocessing_config(), cache, 1))
    assert len({store.folder for store in stores}) == 4
    assert stores[2].read("case_0").image.mean() == pytest.approx(0, abs=1e-5)
    assert all(store.has(dataset.cases[0]) for store in stores)


def test_dataset_folder_depends_on_name_and_files(tmp_path: Path) -> None:
    one, other = tiny(tmp_path / "one", 2), tiny(tmp_path / "other", 2)
    folder = dataset_folder(tmp_path / "cache", one)
    assert folder.parent == tmp_path / "cache" and folder.name.startswith("Tiny-")
    assert dataset_folder(tmp_path / "cache", one) == folder
    assert dataset_folder(tmp_path / "cache", other) != folder
    odd = Dataset("a b/../ü", one.cases, one.class_names, one.modalities)
    assert dataset_folder(tmp_path / "cache", odd).name.startswith("a_b____ü-")
    assert dataset_folder(tmp_path / "cache", odd).parent == tmp_path / "cache"


def test_fingerprint_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []

    def counting(dataset: Dataset, workers: int, skip: bool) -> object:
        checks.append(dataset.name)
        return real(dataset, workers, skip)

    real = preparing.check
    monkeypatch.setattr(preparing, "check", counting)
    dataset, folder = tiny(tmp_path / "data"), tmp_path / "cache"
    first = fingerprint(dataset, folder, 1)
    assert fingerprint(dataset, folder, 1) == first  # read back from JSON it equals what was measured
    assert len(checks) == 1
    save(dataset.cases[0].images[0], image_array(0) + 50)
    touch(dataset.cases[0].images[0])
    second, _ = fingerprint(dataset, folder, 1)
    assert len(checks) == 2
    assert second.intensities[0]["mean"] > first[0].intensities[0]["mean"] + 10
    fingerprint(Dataset("Tiny", dataset.cases, ("background", "a", "b", "c"), ("MRI",)), folder, 1)
    assert len(checks) == 3


def test_fingerprint_of_a_faulty_dataset_is_not_kept(tmp_path: Path) -> None:
    dataset, folder = tiny(tmp_path / "data"), tmp_path / "cache"
    dataset.cases[0].images[0].unlink()
    truncate(dataset.cases[1].images[0])
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"2 errors in 3 cases\n  case case_0: .*no such file\n  case case_1: .*truncated",
        ):
            fingerprint(dataset, folder, 1)
    save(dataset.cases[0].images[0], image_array(0))
    save(dataset.cases[1].images[0], image_array(1))
    assert fingerprint(dataset, folder, 1)[0].spatial_dims == 3


def test_warnings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = tiny(tmp_path / "data")
    save(dataset.cases[2].files[-1], np.zeros(SHAPE, np.uint8))
    with caplog.at_level(logging.WARNING):
        fingerprint(dataset, tmp_path / "cache", 1)
    assert "case case_2: " in caplog.text and "no foreground" in caplog.text


@pytest.mark.parametrize("content", ["", '{"sources": [[', "{}"])
def test_a_record_cut_by_a_power_failure_is_made_anew(tmp_path: Path, content: str) -> None:
    dataset, folder = tiny(tmp_path / "data", 2), tmp_path / "cache"
    first = fingerprint(dataset, folder, 1)
    store = prepare(dataset, preprocessing_config(), folder, 1)
    (store.folder / "case_1.json").write_text(content)
    (folder / "fingerprint.json").write_text(content)
    assert fingerprint(dataset, folder, 1) == first
    assert_complete(prepare(dataset, preprocessing_config(), folder, 1), dataset)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: truncate(path, 0.9),
    "garbage": lambda path: path.write_bytes(b"x" * 4000),
}


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "foreground.npy", "json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_entry_names_its_case(tmp_path: Path, damage: str, name: str) -> None:
    store = prepare(tiny(tmp_path / "data", 1), preprocessing_config(), tmp_path / "cache", 1)
    DAMAGES[damage](store.folder / f"case_0.{name}")
    with pytest.raises(
        ValueError, match=rf"^case case_0: its prepared files in {store.folder} cannot be read \("
    ):
        store.read("case_0")


def test_a_file_that_breaks_after_the_check_is_named(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data")
    truncate(dataset.cases[1].images[0])
    with pytest.raises(ValueError, match=r"case_1\.nii\.gz: damaged or truncated"):
        prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)


def _prepare_and_report(root: Path, cache: Path, log: Path, start: "object", answers: "object") -> None:
    """In a process of its own: note every check and every write in a log that all processes share."""

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(line + "\n")

    real_check, real_write = preparing.check, Store.write

    def slow_check(dataset: Dataset, workers: int, skip: bool) -> object:
        note("check")
        time.sleep(0.1)
        return real_check(dataset, workers, skip)

    def slow_write(self: Store, case: Case, entry: Entry, sources: object) -> None:
        note(case.id)
        time.sleep(0.1)
        real_write(self, case, entry, sources)

    preparing.check, Store.write = slow_check, slow_write  # type: ignore[assignment,method-assign]
    dataset = msd(root)
    start.wait(timeout=60)  # type: ignore[attr-defined]
    found = fingerprint(dataset, cache, 1)
    store = prepare(dataset, preprocessing_config(), cache, 1)
    answers.put((found, all(store.has(case) for case in dataset.cases)))  # type: ignore[attr-defined]


def test_processes_at_once_do_the_work_once(tmp_path: Path) -> None:
    write_msd(tmp_path / "data")
    cache, log = tmp_path / "cache", tmp_path / "log"
    start, answers = FORK.Barrier(3), FORK.Queue()
    arguments = (tmp_path / "data", cache, log, start, answers)
    processes = [FORK.Process(target=_prepare_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert sorted(log.read_text().split()) == ["case_0", "case_1", "case_2", "check"]
    assert all(complete for _, complete in found)
    assert found[0][0] == found[1][0] == found[2][0]
    assert_complete(Store(next(p for p in cache.iterdir() if p.is_dir())), msd(tmp_path / "data"))


@contextmanager
def before_each_file(act: Callable[[Path], None]) -> Iterator[None]:
    """Call `act` right before a file of the store is put in its place."""
    real = atomic_io.replacing

    @contextmanager
    def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
        with real(path, durable) as partial:
            yield partial
            act(path)

    atomic_io.replacing = storing.replacing = replacing
    try:
        yield
    finally:
        atomic_io.replacing = storing.replacing = real


def _prepare_until(root: Path, cache: Path, fatal: str) -> None:
    """Dies by SIGKILL."""
    with before_each_file(lambda path: os.kill(os.getpid(), signal.SIGKILL) if path.name == fatal else None):
        prepare(msd(root), preprocessing_config(), cache, 1)


@pytest.mark.parametrize("fatal", ["case_1.json", "case_1.label.npy", "case_2.image.npy"])
def test_a_killed_preparation_is_taken_up_again(tmp_path: Path, fatal: str) -> None:
    root, cache = write_msd(tmp_path / "data"), tmp_path / "cache"
    process = FORK.Process(target=_prepare_until, args=(root, cache, fatal))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    dataset = msd(root)
    store = Store(next(p for p in cache.iterdir() if p.is_dir()))
    done = int(fatal[5])
    assert [store.has(case) for case in dataset.cases] == [i < done for i in range(3)]
    before = times(store)
    assert prepare(dataset, preprocessing_config(), cache, 1).folder == store.folder
    after = times(store)
    assert all(after[name] == before[name] for name in before if int(name[5]) < done)
    assert_complete(store, dataset)


def test_a_reader_never_sees_half_an_entry(tmp_path: Path) -> None:
    """While a case is replaced its record is away, so that no record ever stands beside arrays of another
    file.
    """
    dataset = tiny(tmp_path / "data", 1)
    (case,) = dataset.cases
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    seen: list[tuple[str, bool]] = []
    with before_each_file(lambda path: seen.append((path.name, store.has(case)))):
        store.write(case, prepare_case(case, preprocessing_config(), 3))
    assert seen == [(f"case_0.{n}", False) for n in ("image.npy", "label.npy", "foreground.npy", "json")]
    assert store.has(case)


def test_renamed_classes_do_not_touch_the_labels(tmp_path: Path) -> None:
    root = write_msd(tmp_path / "data", 1)
    dataset = msd(edit_json(root, labels={"0": "background", "1": "one", "2": "two", "3": "three"}))
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    label, crop_info = label_array(0).astype(np.int16), store.crop_info("case_0")
    np.testing.assert_array_equal(
        store.read("case_0").label, preprocess_label(label, crop_info, preprocessing_config(), 4)
    )
    json.loads((store.folder / "case_0.json").read_text())


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    dataset = msd(write_msd(tmp_path / "raw"))
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    (store.folder / ".4711.case_1.image.npy").write_bytes(b"half")
    next(store.folder.glob("*.json")).unlink()
    prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert not list(store.folder.glob(".*"))
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
def test_a_record_is_not_trusted_with_memory(tmp_path: Path, change: dict[str, object]) -> None:
    """Its checksum can be made by anybody: what it says of an array is checked against plain numbers and
    the file.
    """
    (case,) = (dataset := tiny(tmp_path / "data", 1)).cases
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    record = store._record(case.id)
    record["arrays"]["image"] |= change
    store._commit(case.id, record)
    with pytest.raises(ValueError, match=r"^case case_0: its prepared files in .* cannot be read \("):
        store.read(case.id)


def test_parts_of_different_cases_are_no_entry(tmp_path: Path) -> None:
    (case,) = (dataset := tiny(tmp_path / "data", 1)).cases
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    record = store._record(case.id)
    record["arrays"]["label"] = storing._save(
        store._path(case.id, "label.npy"), np.zeros((4, 4, 4), np.uint8)
    )
    store._commit(case.id, record)
    with pytest.raises(ValueError, match="do not belong together"):
        store.read(case.id)


@pytest.mark.parametrize("name", ["zscore", "ct"])
def test_one_changed_file_is_one_case_to_prepare(tmp_path: Path, name: str) -> None:
    """But for `ct`, where all cases depend on the intensities of all."""
    dataset = tiny(tmp_path / "data", 4)

    def prepared() -> Store:
        found, _ = fingerprint(dataset, tmp_path / "cache", 1)
        return prepare(
            dataset,
            replace(preprocessing_config(normalisation=name), intensities=found.intensities),
            tmp_path / "cache",
            1,
        )

    before = prepared()
    times = {path.name: path.stat().st_mtime_ns for path in before.folder.glob("*.json")}
    save(dataset.cases[2].images[0], image_array(2) * 1.01)
    after = prepared()
    if name == "ct":
        assert after.folder != before.folder
    else:
        changed = {
            path.name for path in after.folder.glob("*.json") if path.stat().st_mtime_ns != times[path.name]
        }
        assert after.folder == before.folder and changed == {"case_2.json"}


def test_a_further_case_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    few = tiny(tmp_path / "data", 2)
    more = tiny(tmp_path / "data", 3)
    assert dataset_folder(tmp_path, few) == dataset_folder(tmp_path, more)
    assert dataset_folder(tmp_path, few) != dataset_folder(tmp_path, tiny(tmp_path / "other", 2))


@pytest.mark.parametrize(
    "damage",
    [
        lambda case: save(case.images[0], np.full(SHAPE, np.nan, np.float32)),
        lambda case: save(case.label, np.full(SHAPE, 9, np.uint8)),
        lambda case: save(case.label, label_array(0)[:-1]),
    ],
)
def test_files_that_were_replaced_since_the_check_do_not_enter(
    tmp_path: Path, damage: Callable[[Case], object]
) -> None:
    dataset = tiny(tmp_path / "data", 2)
    fingerprint(dataset, tmp_path / "cache", 1)
    damage(dataset.cases[1])
    with pytest.raises(ValueError, match=r"case_1"):
        prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    (store,) = (Store(path) for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert not store.has(dataset.cases[1])


def test_a_complete_store_that_may_only_be_read_is_used(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 2)
    found, _ = fingerprint(dataset, tmp_path / "cache", 1)
    ours = replace(preprocessing_config(), intensities=found.intensities)
    store = prepare(dataset, ours, tmp_path / "cache", 1)

    def read() -> None:
        assert fingerprint(dataset, tmp_path / "cache", 1)[0] == found
        again = prepare(dataset, ours, tmp_path / "cache", 1)
        assert again.folder == store.folder and again.read("case_1").label.shape == SHAPE

    os.chmod(tmp_path / "cache", 0o555)  # noqa: PTH101
    (tmp_path / "cache/.lock").chmod(0o444)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)  # pytest's own folders are closed to others
    assert unprivileged(read) == ""


def test_what_is_not_ours_stays_in_the_store(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 2)
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    (store.folder / ".snapshot.of.today").mkdir()
    (store.folder / ".77.case_0.json").write_text("left behind")
    store._path("case_0", "json").unlink()
    prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert (store.folder / ".snapshot.of.today").is_dir() and not (store.folder / ".77.case_0.json").exists()
    assert store.has(dataset.cases[0])
