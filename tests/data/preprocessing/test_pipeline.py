"""medconv/data/preprocessing/pipeline.py and store.py: damage is found and mended, faulty cases are left
out, full disks are survived.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import ROOT
from helpers.volumes import (
    image_array,
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
from medconv.data.preprocessing.pipeline import fingerprint, prepare
from medconv.data.preprocessing.store import Entry, Store


def times(store: Store) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in store.folder.iterdir()}


def redone(store: Store, before: dict[str, int]) -> set[str]:
    """Cases of which anything was written since."""
    return {name.split(".")[0] for name, when in times(store).items() if before.get(name) != when}


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def rot(path: Path) -> None:
    """A changed byte that nobody wrote: size and time stay."""
    stat = path.stat()
    change_a_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def assert_as_new(store: Store, dataset: Dataset) -> None:
    for case in dataset.cases:
        wanted = preparing.prepare_case(case, preprocessing_config(), len(dataset.class_names))
        np.testing.assert_array_equal(store.read(case.id).image, wanted.image)
        np.testing.assert_array_equal(store.read(case.id).label, wanted.label)


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "foreground.npy", "json"])
@pytest.mark.parametrize(
    "damage", [truncate, change_a_byte, lambda path: path.unlink()], ids=["cut", "changed", "gone"]
)
def test_a_damaged_entry_is_noticed_at_the_next_start_and_redone(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = prepare(dataset, preprocessing_config(), cache, 2)
    before = times(store)
    damage(store.folder / f"case_1.{name}")
    assert [store.has(case) for case in dataset.cases] == [True, False, True]
    prepare(dataset, preprocessing_config(), cache, 2)
    assert redone(store, before) == {"case_1"}
    assert_as_new(store, dataset)


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "foreground.npy"])
def test_damage_that_leaves_no_trace_is_found_on_request(tmp_path: Path, name: str) -> None:
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = prepare(dataset, preprocessing_config(), cache, 1)
    before = times(store)
    rot(store.folder / f"case_2.{name}")
    prepare(dataset, preprocessing_config(), cache, 1)
    assert redone(store, before) == set()
    prepare(dataset, preprocessing_config(), cache, 1, verify=True)
    assert redone(store, before) == {"case_2"}
    assert_as_new(store, dataset)


def test_a_copied_store_is_good_and_is_read_only_once(tmp_path: Path) -> None:
    """Tools that copy give files a new time; then the checksum decides, and the new time is remembered."""
    dataset, cache = tiny(tmp_path / "data"), tmp_path / "cache"
    store = prepare(dataset, preprocessing_config(), cache, 1)
    shutil.copytree(cache, tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (tmp_path / "copy").rglob("*.npy"):
        os.utime(path, ns=(1, 1_000_000_000))
    copy = Store(tmp_path / "copy" / store.folder.name)
    before = times(copy)
    assert prepare(dataset, preprocessing_config(), tmp_path / "copy", 1).folder == copy.folder
    assert {name for name, when in times(copy).items() if before[name] != when} == {
        f"case_{i}.json" for i in range(3)
    }
    before = times(copy)
    prepare(dataset, preprocessing_config(), tmp_path / "copy", 1)
    assert redone(copy, before) == set()
    change_a_byte(copy.folder / "case_0.image.npy")
    prepare(dataset, preprocessing_config(), tmp_path / "copy", 1)
    assert redone(copy, before) == {"case_0"}
    assert_as_new(copy, dataset)


def test_a_copied_store_that_may_only_be_read_is_used_as_it_is(open_folder: Path) -> None:
    dataset = tiny(open_folder / "data", 1)
    store = prepare(dataset, preprocessing_config(), open_folder / "cache", 1)
    os.utime(store.folder / "case_0.image.npy", ns=(1, 1))

    def look() -> None:
        raise ValueError(store.has(dataset.cases[0]))

    assert unprivileged(look) == "ValueError: True"


def test_an_entry_of_another_recipe_is_none_of_this(tmp_path: Path) -> None:
    dataset, cache = tiny(tmp_path / "data", 1), tmp_path / "cache"
    one, other = (
        prepare(dataset, preprocessing_config(), cache, 1),
        prepare(dataset, preprocessing_config(normalisation="zscore"), cache, 1),
    )
    for path in other.folder.iterdir():
        shutil.copy2(path, one.folder / path.name)
    assert not one.has(dataset.cases[0])
    prepare(dataset, preprocessing_config(), cache, 1)
    assert_as_new(one, dataset)


def test_a_file_that_changes_while_it_is_prepared_is_prepared_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, cache = tiny(tmp_path / "data", 1), tmp_path / "cache"
    real = preparing.prepare_case

    def replaced_meanwhile(case: Case, *arguments: object) -> Entry:
        entry = real(case, *arguments)  # type: ignore[arg-type]
        save(case.images[0], image_array(0) + 7)
        os.utime(case.images[0], ns=(1, 1))
        return entry

    monkeypatch.setattr(preparing, "prepare_case", replaced_meanwhile)
    store = prepare(dataset, preprocessing_config(), cache, 1)
    assert not store.has(dataset.cases[0])
    monkeypatch.undo()
    prepare(dataset, preprocessing_config(), cache, 1)
    assert_as_new(store, dataset)


def test_a_damaged_entry_in_a_worker_names_case_and_remedy(tmp_path: Path) -> None:
    store = prepare(tiny(tmp_path / "data", 1), preprocessing_config(), tmp_path / "cache", 1)
    truncate(store.folder / "case_0.image.npy")
    with pytest.raises(
        ValueError,
        match=r"^case case_0: .* cannot be read \(.*\); start again, and what is damaged is prepared",
    ):
        store.read("case_0")


def test_the_fingerprint_file_tells_what_a_dataset_is(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 2)
    found, skipped = fingerprint(dataset, tmp_path / "cache", 1)
    content = json.loads((tmp_path / "cache/fingerprint.json").read_text())
    assert (
        skipped == {}
        and content["cases"] == ["case_0", "case_1"]
        and content["class_names"] == list(dataset.class_names)
    )
    assert content["fingerprint"]["shapes"] == [[12, 14, 10]] * 2
    assert content["fingerprint"]["intensities"][0]["mean"] == found.intensities[0]["mean"]
    voxels = np.array(content["fingerprint"]["class_voxels"])
    np.testing.assert_allclose(content["class_volumes_ml"], voxels * 1.0 * 1.5 * 2.0 / 1000)


def test_faulty_cases_are_left_out_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint(tiny(tmp_path / "two", 2), tmp_path / "a", 1)[0]
    dataset, folder = tiny(tmp_path / "three", 3), tmp_path / "b"
    kept = dataset.cases[2].images[0].read_bytes()
    dataset.cases[2].images[0].write_bytes(b"")
    with pytest.raises(ValueError, match="1 errors in 3 cases"):
        fingerprint(dataset, folder, 1)
    found, skipped = fingerprint(dataset, folder, 1, skip=True)
    assert found == whole
    assert skipped == {"case_2": f"{dataset.cases[2].images[0]}: the file is empty (0 bytes)"}
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "check", None)  # nothing is checked again
        assert fingerprint(dataset, folder, 1, skip=True) == (found, skipped)
    with pytest.raises(ValueError, match="1 errors in 3 cases"):
        fingerprint(dataset, folder, 1)
    dataset.cases[2].images[0].write_bytes(kept)
    found, skipped = fingerprint(dataset, folder, 1, skip=True)
    assert skipped == {} and len(found.shapes) == 3


def test_a_fault_that_goes_without_a_trace_is_forgotten(open_folder: Path) -> None:
    """Permissions change neither size nor time."""
    dataset = tiny(open_folder / "data")
    (open_folder / "cache").mkdir(mode=0o777)
    (open_folder / "cache").chmod(0o777)
    dataset.cases[0].images[0].chmod(0)

    def look() -> None:
        raise ValueError(sorted(fingerprint(dataset, open_folder / "cache/x", 1, skip=True)[1]))

    assert unprivileged(look) == "ValueError: ['case_0']"
    assert unprivileged(look) == "ValueError: ['case_0']"
    dataset.cases[0].images[0].chmod(0o644)
    assert unprivileged(look) == "ValueError: []"


def test_what_a_layout_shows_is_a_fault_among_others(tmp_path: Path) -> None:
    root = write_nnunet(tmp_path / "data", 4)
    (root / "imagesTr/case_1_0001.nii.gz").unlink()
    (root / "labelsTr/case_2.nii.gz").unlink()
    dataset = nnunet(root)
    with pytest.raises(
        ValueError, match=r"2 errors in 4 cases\n  case case_1: .*found \[0\]\n  case case_2: .*no such file"
    ):
        fingerprint(dataset, tmp_path / "cache", 1)
    found, skipped = fingerprint(dataset, tmp_path / "cache", 1, skip=True)
    assert sorted(skipped) == ["case_1", "case_2"] and len(found.shapes) == 2


def test_no_good_case_is_an_error_also_with_skip(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 2)
    for case in dataset.cases:
        case.images[0].write_bytes(b"")
    with pytest.raises(ValueError, match="2 errors in 2 cases"):
        fingerprint(dataset, tmp_path / "cache", 1, skip=True)


FULL = (
    r"case case_(\d): no room in {folder} \({reason}\): this case needs 1\.\d MB, [\d.]+ MB are free; "
    r"make room, or name "
)
PREPARE = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.volumes import msd, preprocessing_config
from medconv.data.preprocessing.pipeline import prepare
{before}
try:
    prepare(msd({root!r}), preprocessing_config(), Path({cache!r}), 1)
except ValueError as error:
    print(error)
"""


def prepare_apart(root: Path, cache: Path, before: str = "", launcher: tuple[str, ...] = ()) -> str:
    code = PREPARE.format(tests=str(ROOT / "tests"), root=str(root), cache=str(cache), before=before)
    done = subprocess.run(
        [*launcher, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=root.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_named_and_the_next_start_goes_on(tmp_path: Path) -> None:
    """A real one, of 4 MB, for three cases of 1.25 MB each; then the files are moved to a larger one."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("`unshare -rm` is not allowed here, so no small disk can be mounted")
    root, cache = write_msd(tmp_path / "data", 5, shape=(64, 64, 64)), tmp_path / "cache"
    cache.mkdir()
    mount = f'mount -t tmpfs -o size=4m tmpfs "{cache}" && "$@"; cp -r "{cache}" "{tmp_path / "saved"}"'
    said = prepare_apart(root, cache, launcher=("unshare", "-rm", "sh", "-c", mount, "sh"))
    folder = r"\S+/cache/\w+"
    found = re.match(FULL.format(folder=folder, reason="No space left on device"), said)
    assert found and int(found[1]) in (2, 3), said
    (store,) = [Store(p) for p in (tmp_path / "saved").iterdir() if p.is_dir()]
    assert not list(store.folder.glob(".*"))  # what did not fit is gone
    before = times(store)
    prepare(msd(root), preprocessing_config(), tmp_path / "saved", 1)
    assert redone(store, before) >= {f"case_{i}" for i in range(int(found[1]), 5)}
    arrays = {f"case_{i}.image.npy" for i in range(int(found[1]))}
    assert {name: when for name, when in times(store).items() if name in arrays} == {
        name: before[name] for name in arrays
    }
    assert_as_new(store, msd(root))


def test_a_file_that_may_not_grow_is_named_too(tmp_path: Path) -> None:
    root, cache = write_msd(tmp_path / "data", 2, shape=(64, 64, 64)), tmp_path / "cache"
    limit = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, "
        "(500_000,) * 2)"
    )
    said = prepare_apart(root, cache, limit)
    assert re.match(FULL.format(folder=r"\S+/cache/\w+", reason="File too large"), said), said
    store = prepare(msd(root), preprocessing_config(), cache, 1)
    assert [p for p in cache.iterdir() if p.is_dir()] == [store.folder]
    assert_as_new(store, msd(root))


def test_a_cache_that_may_not_be_written_is_named(open_folder: Path) -> None:
    dataset = tiny(open_folder / "data", 1)
    said = unprivileged(fingerprint, dataset, open_folder / "cache", 1)
    assert said == f"ValueError: data.cache_dir: cannot write to {open_folder / 'cache'} (Permission denied)"
    fingerprint(dataset, open_folder / "cache", 1)
    (open_folder / "cache").chmod(0o777)
    store = prepare(dataset, preprocessing_config(), open_folder / "cache", 1)
    (store.folder / "case_0.json").write_text("")
    (open_folder / "cache/.lock").chmod(0o666)
    said = unprivileged(prepare, dataset, preprocessing_config(), open_folder / "cache", 1)
    assert said.endswith(
        f"cannot write to {store.folder} (Permission denied); data.cache_dir names another place"
    )


def test_no_room_for_the_findings_is_named_too(tmp_path: Path) -> None:
    root, cache = write_msd(tmp_path / "data", 2), tmp_path / "cache"
    code = PREPARE.replace("import prepare\n", "import fingerprint\n").replace(
        "prepare(msd({root!r}), preprocessing_config(),", "fingerprint(msd({root!r}),"
    )
    limit = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100,) * 2)"
    )
    code = code.format(tests=str(ROOT / "tests"), root=str(root), cache=str(cache), before=limit)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == f"data.cache_dir: cannot write to {cache} (File too large)\n", done.stderr
    assert [path.name for path in cache.iterdir()] == [".lock"]
