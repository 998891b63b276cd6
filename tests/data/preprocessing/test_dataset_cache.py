"""medconv/data/preprocessing/dataset_cache.py: cases are prepared once, faulty cases are named or left out."""

import json
import logging
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.stores import ARRAYS, assert_complete, rewritten, times, touch
from helpers.volumes import (
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
)
from helpers.waiting import PATIENCE_S

from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import msd
from medconv.data.preprocessing import dataset_cache
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, dataset_folder, examined, fill_store
from medconv.data.preprocessing.preprocess import preprocess_label
from medconv.data.preprocessing.store import Store


def test_cases_are_prepared_once(tmp_path):
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = fill_store(dataset, preprocessing_config(), cache, 2)
    before = times(store)
    ends = ("json", *(f"{name}.npy" for name in ARRAYS))
    assert set(before) == {f"case_{i}.{end}" for i in range(3) for end in ends}
    assert_complete(store, dataset)
    again = fill_store(msd(tmp_path / "data"), preprocessing_config(), cache, 2)
    assert again.folder == store.folder and times(again) == before


def test_adding_a_case_keeps_the_others(tmp_path):
    dataset = tiny(tmp_path / "data", 3)
    two = Dataset(dataset.name, dataset.cases[:2], dataset.class_names, dataset.modalities)
    store = fill_store(two, preprocessing_config(), tmp_path / "cache", 1)
    before = times(store)
    fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    assert rewritten(store, before) == {"case_2"}
    assert_complete(store, dataset)


def test_each_config_has_its_own_store(tmp_path):
    dataset, cache = tiny(tmp_path / "data", 1), tmp_path / "cache"
    settings = [{}, {"spacing_mm": (1, 1.5, 2.1)}, {"normalisation": "zscore"}]
    stores = [fill_store(dataset, preprocessing_config(**kwargs), cache, 1) for kwargs in settings]
    renamed = Dataset(dataset.name, dataset.cases, ("background", "one", "two"), dataset.modalities)
    stores.append(fill_store(renamed, preprocessing_config(), cache, 1))
    assert len({store.folder for store in stores}) == 4
    assert stores[2].read("case_0").image.mean() == pytest.approx(0, abs=1e-5)
    assert all(store.has(dataset.cases[0]) for store in stores)


@pytest.mark.parametrize("name", ["zscore", "ct", "dataset"])
def test_a_changed_image_affects_other_cases_only_with_ct_and_dataset(tmp_path, name):
    """With these, each case depends on the intensities of all cases."""
    dataset = tiny(tmp_path / "data", 4)

    def prepared():
        measured, _ = cached_fingerprint(dataset, tmp_path / "cache", 1)
        config = replace(preprocessing_config(normalisation=name), intensities=measured.intensities)
        return fill_store(dataset, config, tmp_path / "cache", 1)

    first = prepared()
    before = times(first)
    save(dataset.cases[2].images[0], image_array(2) * 1.01)
    second = prepared()
    if name != "zscore":
        assert second.folder != first.folder
    else:
        assert second.folder == first.folder and rewritten(second, before) == {"case_2"}


def test_renamed_classes_do_not_change_the_labels(tmp_path):
    root = write_msd(tmp_path / "data", 1)
    dataset = msd(edit_json(root, labels={"0": "background", "1": "one", "2": "two", "3": "three"}))
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    label, crop_info = label_array(0).astype(np.int16), store.read("case_0").crop_info
    expected = preprocess_label(label, crop_info, preprocessing_config(), 4)
    np.testing.assert_array_equal(store.read("case_0").label, expected)
    json.loads((store.folder / "case_0.json").read_text())


@pytest.mark.parametrize(
    "damage",
    [
        lambda case: save(case.images[0], np.full(SHAPE, np.nan, np.float32)),
        lambda case: save(case.label, np.full(SHAPE, 9, np.uint8)),
        lambda case: save(case.label, label_array(0)[:-1]),
        lambda case: truncate(case.images[0]),
    ],
)
def test_files_replaced_since_the_check_are_not_prepared(tmp_path, damage):
    dataset = tiny(tmp_path / "data", 2)
    cached_fingerprint(dataset, tmp_path / "cache", 1)
    damage(dataset.cases[1])
    with pytest.raises(ValueError, match=r"case_1"):
        fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    (store,) = (Store(path) for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert not store.has(dataset.cases[1])


def test_a_case_that_does_not_fit_into_memory_is_named(tmp_path, monkeypatch):
    def preprocess(*args):
        raise MemoryError("Unable to allocate 29.5 GiB")

    monkeypatch.setattr(dataset_cache, "preprocess_case", preprocess)
    dataset = tiny(tmp_path / "data", 1)
    expected = rf"case {dataset.cases[0].id}: memory ran out .* 1 x 1.5 x 2 mm .*prepare_workers=1 .*29.5 GiB"
    with pytest.raises(ValueError, match=expected):
        fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)


@pytest.mark.parametrize("content", ["", '{"sources": [[', "{}"])
def test_records_cut_by_a_power_failure_are_written_again(tmp_path, content):
    dataset, folder = tiny(tmp_path / "data", 2), tmp_path / "cache"
    first = cached_fingerprint(dataset, folder, 1)
    store = fill_store(dataset, preprocessing_config(), folder, 1)
    (store.folder / "case_1.json").write_text(content)
    (folder / "fingerprint.json").write_text(content)
    assert cached_fingerprint(dataset, folder, 1) == first
    assert_complete(fill_store(dataset, preprocessing_config(), folder, 1), dataset)


def test_a_complete_read_only_cache_is_used(tmp_path):
    dataset = tiny(tmp_path / "data", 2)
    measured, _ = cached_fingerprint(dataset, tmp_path / "cache", 1)
    config = replace(preprocessing_config(), intensities=measured.intensities)
    store = fill_store(dataset, config, tmp_path / "cache", 1)

    def read():
        assert cached_fingerprint(dataset, tmp_path / "cache", 1)[0] == measured
        again = fill_store(dataset, config, tmp_path / "cache", 1)
        assert again.folder == store.folder and again.read("case_1").label.shape == SHAPE

    os.chmod(tmp_path / "cache", 0o555)  # noqa: PTH101
    (tmp_path / "cache/.lock").chmod(0o444)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)  # the folders of pytest are closed to other users
    assert unprivileged(read) == ""


@pytest.mark.parametrize(
    "pattern",
    [
        "{}.png",
        "{}_0000.png",
        "{}_T1.png",
        "T1_{}.png",
        "img{}.png",
        "sub-{0}/anat/sub-{0}_T1.png",
        "p{}/a.png",
    ],
)
def test_a_further_case_is_no_other_dataset(pattern, tmp_path):
    """Whatever its id is, and where; in the folders above all cases a number is no id."""
    root = tmp_path / "2024_study1"
    files = [Case(name, (root / pattern.format(name),)) for name in ("5", "6", "2", "1", "0", "24")]
    first, *others = (Dataset("s", tuple(files[:n]), ("a",), ("MRI",)) for n in (2, 3, 4, 5, 6))
    for more in others:
        assert dataset_folder(tmp_path, first) == dataset_folder(tmp_path, more)


def test_files_keep_the_name_of_their_cache(tmp_path):
    """That of earlier commits: a hash of the paths with `*` for ids."""
    dataset = tiny(tmp_path / "one", 2)
    expected = {str(path.resolve()).replace(case.id, "*") for case in dataset.cases for path in case.files}
    assert dataset_folder(tmp_path, dataset).name.endswith(dataset_cache._hash(sorted(expected)))


def test_dataset_folder_depends_on_name_and_files(tmp_path):
    one, other = tiny(tmp_path / "one", 2), tiny(tmp_path / "other", 2)
    folder = dataset_folder(tmp_path / "cache", one)
    assert folder.parent == tmp_path / "cache" and folder.name.startswith("Tiny-")
    assert dataset_folder(tmp_path / "cache", tiny(tmp_path / "one", 3)) == folder  # with one case more
    assert dataset_folder(tmp_path / "cache", other) != folder
    for case in one.cases:  # one scan is replaced by a link, as in a store of large files
        image = case.images[0]
        image.rename(tmp_path / f"{hash(case.id)}.content")
        image.symlink_to(tmp_path / f"{hash(case.id)}.content")
        break
    assert dataset_folder(tmp_path / "cache", one) == folder
    odd = Dataset("a b/../ü", one.cases, one.class_names, one.modalities)
    assert dataset_folder(tmp_path / "cache", odd).name.startswith("a_b____ü-")
    assert dataset_folder(tmp_path / "cache", odd).parent == tmp_path / "cache"


def test_processes_that_check_at_once_share_the_cases(tmp_path):
    dataset, folder = tiny(tmp_path / "data", 6), tmp_path / "cache"
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)
    shapes = fork.Queue()

    def work():
        start.wait()
        report_of = examined(dataset, folder, workers=1)
        shapes.put([report_of(case).shape for case in dataset.cases])

    processes = [fork.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    one, other = (shapes.get(timeout=PATIENCE_S) for _ in processes)
    for process in processes:
        process.join(PATIENCE_S)
    assert one == other == [SHAPE] * 6
    # A line for each case that was read
    assert sum(bool(line) for line in (folder / "examined.jsonl").read_text().splitlines()) == 6
    assert not (folder / ".checking").exists()


def test_fingerprint_is_kept_until_a_file_changes(tmp_path, monkeypatch):
    checks = []

    def counting(dataset, *options):
        checks.append(dataset.name)
        return real(dataset, *options)

    real = dataset_cache.check
    monkeypatch.setattr(dataset_cache, "check", counting)
    dataset, folder = tiny(tmp_path / "data"), tmp_path / "cache"
    first = cached_fingerprint(dataset, folder, 1)
    assert cached_fingerprint(dataset, folder, 1) == first  # read back from JSON it equals what was measured
    assert len(checks) == 1
    save(dataset.cases[0].images[0], image_array(0) + 50)
    touch(dataset.cases[0].images[0])
    second, _ = cached_fingerprint(dataset, folder, 1)
    assert len(checks) == 2
    assert second.intensities[0]["mean"] > first[0].intensities[0]["mean"] + 10
    cached_fingerprint(Dataset("Tiny", dataset.cases, ("background", "a", "b", "c"), ("MRI",)), folder, 1)
    assert len(checks) == 3


def test_warnings_are_logged(tmp_path, caplog):
    dataset = tiny(tmp_path / "data")
    save(dataset.cases[2].files[-1], np.zeros(SHAPE, np.uint8))
    with caplog.at_level(logging.WARNING):
        cached_fingerprint(dataset, tmp_path / "cache", 1)
    assert "case case_2: " in caplog.text and "no foreground" in caplog.text


def test_a_file_that_changes_while_it_is_prepared_is_prepared_again(tmp_path, monkeypatch):
    dataset, cache = tiny(tmp_path / "data", 1), tmp_path / "cache"
    real = dataset_cache.preprocess_case

    def replaced_meanwhile(case, *arguments):
        entry = real(case, *arguments)
        save(case.images[0], image_array(0) + 7)
        os.utime(case.images[0], ns=(1, 1))
        return entry

    monkeypatch.setattr(dataset_cache, "preprocess_case", replaced_meanwhile)
    store = fill_store(dataset, preprocessing_config(), cache, 1)
    assert not store.has(dataset.cases[0])
    monkeypatch.undo()
    fill_store(dataset, preprocessing_config(), cache, 1)
    assert_complete(store, dataset)


def test_the_fingerprint_file_describes_the_dataset(tmp_path):
    dataset = tiny(tmp_path / "data", 2)
    measured, skipped = cached_fingerprint(dataset, tmp_path / "cache", 1)
    content = json.loads((tmp_path / "cache/fingerprint.json").read_text())
    assert skipped == {} and content["cases"] == ["case_0", "case_1"]
    assert content["class_names"] == list(dataset.class_names)
    assert content["fingerprint"]["shapes"] == [[12, 14, 10]] * 2
    assert content["fingerprint"]["intensities"][0]["mean"] == measured.intensities[0]["mean"]
    voxels = np.array(content["fingerprint"]["class_voxels"])
    np.testing.assert_allclose(content["class_volumes_ml"], voxels * 1.0 * 1.5 * 2.0 / 1000)


def test_a_store_knows_which_channels_a_case_lacks(tmp_path):
    """In another order of channels its files are the same, and belong elsewhere."""
    dataset = tiny(tmp_path, 2)
    names = set()
    for missing in ((), (0,), (1,)):
        cases = (dataset.cases[0], replace(dataset.cases[1], missing_channels=missing))
        names.add(dataset_cache._store_name(replace(dataset, cases=cases), preprocessing_config()))
    assert len(names) == 3


def test_skip_leaves_out_faulty_cases(tmp_path, monkeypatch):
    expected = cached_fingerprint(tiny(tmp_path / "two", 2), tmp_path / "a", 1)[0]
    dataset, folder = tiny(tmp_path / "three", 3), tmp_path / "b"
    content = dataset.cases[2].images[0].read_bytes()
    dataset.cases[2].images[0].write_bytes(b"")
    with pytest.raises(ValueError, match="1 error in 3 cases"):
        cached_fingerprint(dataset, folder, 1)
    measured, skipped = cached_fingerprint(dataset, folder, 1, skip=True)
    assert measured == expected
    assert skipped == {"case_2": f"{dataset.cases[2].images[0]}: the file is empty (0 bytes)"}
    with monkeypatch.context() as patch:
        patch.setattr(dataset_cache, "check", None)  # nothing is checked again
        assert cached_fingerprint(dataset, folder, 1, skip=True) == (measured, skipped)
    with pytest.raises(ValueError, match="1 error in 3 cases"):
        cached_fingerprint(dataset, folder, 1)
    dataset.cases[2].images[0].write_bytes(content)
    measured, skipped = cached_fingerprint(dataset, folder, 1, skip=True)
    assert skipped == {} and len(measured.shapes) == 3


def test_a_case_with_repaired_permissions_is_used_again(open_folder):
    """Permissions change neither size nor time."""
    dataset = tiny(open_folder / "data")
    (open_folder / "cache").mkdir(mode=0o777)
    (open_folder / "cache").chmod(0o777)
    dataset.cases[0].images[0].chmod(0)

    def look():
        raise ValueError(sorted(cached_fingerprint(dataset, open_folder / "cache/x", 1, skip=True)[1]))

    assert unprivileged(look) == "ValueError: ['case_0']"
    assert unprivileged(look) == "ValueError: ['case_0']"
    dataset.cases[0].images[0].chmod(0o644)
    assert unprivileged(look) == "ValueError: []"


def test_skip_needs_a_good_case(tmp_path):
    dataset = tiny(tmp_path / "data", 2)
    for case in dataset.cases:
        case.images[0].write_bytes(b"")
    with pytest.raises(ValueError, match="2 errors in 2 cases"):
        cached_fingerprint(dataset, tmp_path / "cache", 1, skip=True)


def test_an_unwritable_cache_is_named(open_folder):
    dataset = tiny(open_folder / "data", 1)
    error = unprivileged(cached_fingerprint, dataset, open_folder / "cache", 1)
    assert error == f"ArgumentError: cache_dir: cannot write to {open_folder / 'cache'} (Permission denied)"
    cached_fingerprint(dataset, open_folder / "cache", 1)
    (open_folder / "cache").chmod(0o777)
    store = fill_store(dataset, preprocessing_config(), open_folder / "cache", 1)
    (store.folder / "case_0.json").write_text("")
    (open_folder / "cache/.lock").chmod(0o666)
    error = unprivileged(fill_store, dataset, preprocessing_config(), open_folder / "cache", 1)
    assert error == f"ArgumentError: cache_dir: cannot write to {store.folder} (Permission denied)"
