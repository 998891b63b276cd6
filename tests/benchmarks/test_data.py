"""scripts/benchmarks/data.py and its parts, at tiny sizes: real contestants, real files, and honest
numbers.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.benchmarks_harness import ManualClock, benchmark, peers_are_forked

from benchmark import main
from benchmarks import contest, datasets, stores
from benchmarks.peers import serving
from benchmarks.peers.process import NNUNET_DATA, TORCHIO_DATA, PeerProcess

KEYS = {
    "benchmark",
    "case",
    "variant",
    "reference",
    "seconds",
    "ratio",
    "spread",
    "device",
    "hardware",
    "cores",
    "torch",
}
TINY = ["--small-shape", "14", "20", "18", "--small-patch", "16", "16", "16", "--small-cases", "2"]
LARGE = ["--large-shape", "40", "44", "36", "--large-patch", "16", "24", "16", "--large-cases", "2"]
SHORT = ["--rounds", "2", "--seconds", "0.05", "--prepare-rounds", "1", "--reads", "2", "--batches", "2"]
PEERS = {"nnU-Net": "MEDCONV_NNUNET_PYTHON", "TorchIO": "MEDCONV_TORCHIO_PYTHON"}


@pytest.mark.parametrize(("part", "ours"), [("loader", "ours"), ("transforms", "ours, batch 2")])
def test_loaders_and_transforms_take_turns(
    part: str,
    ours: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peers_are_forked(monkeypatch)
    arguments = ["--parts", part, "--sets", "small", *TINY, *SHORT]
    rows = benchmark(monkeypatch, tmp_path, "data", *arguments)
    assert all(set(row) >= KEYS and row["seconds"] > 0 and row["benchmark"] == part for row in rows)
    assert {row["variant"] for row in rows} == {"MONAI", ours}
    for row in rows:
        assert row["reference"] == "MONAI" and (row["ratio"] == 1 or row["variant"] != "MONAI")
        assert row["samples"] >= 2 and row["samples_per_second"] == pytest.approx(1 / row["seconds"])
        assert (row["cores"], row["threads"]) == (1, 1)
        assert row["samples"] % 2 == 0 or (part, row["variant"]) != ("loader", "ours")  # batches of two
    printed = capsys.readouterr().out
    assert (
        "nnU-Net is left out: --nnunet-python names no python" in printed and "TorchIO is left out" in printed
    )
    assert ("times the better of MONAI and TorchIO" in printed) == (part == "loader")


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_with_its_own_environment(peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = os.environ.get(PEERS[peer])
    if not python:
        pytest.skip(f"{PEERS[peer]} names no python that has {peer}")
    option = "--nnunet-python" if peer == "nnU-Net" else "--torchio-python"
    parts = ["loader", "transforms", *(["prepare"] if peer == "nnU-Net" else [])]
    arguments = ["--parts", *parts, "--sets", "small", *TINY, *SHORT, option, python]
    rows = benchmark(monkeypatch, tmp_path, "data", *arguments)
    theirs = [row for row in rows if row["variant"] == peer]
    assert [row["benchmark"] for row in theirs] == parts
    assert all(row["about"].startswith(peer + " ") and row["samples"] >= 2 for row in theirs)
    if peer == "nnU-Net":
        assert sum(row["variant"] == "nnU-Net, nearest labels" for row in rows) == 2
        assert set(theirs[-1]["parts"]) == {"fingerprint", "plan", "preprocess"}


def test_preparing_is_counted_in_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers_are_forked(monkeypatch)
    dataset = tiny.write_dataset(tmp_path / "data", cases=3)
    scratch = tmp_path / "scratch"
    arguments = [
        "--parts",
        "prepare",
        "--sets",
        "small",
        "--root",
        str(dataset),
        "--scratch",
        str(scratch),
        *TINY[-2:],
    ]
    (row,) = benchmark(monkeypatch, tmp_path, "data", *arguments, *TINY[4:8], *SHORT)
    assert (row["variant"], row["samples"], row["cores"]) == ("ours", 2, len(os.sched_getaffinity(0)))
    assert not list(scratch.glob("*/patch16x16x16/tmp*"))  # what was prepared to be timed is gone


def test_every_format_gives_back_the_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = {
        row["variant"]: row
        for row in benchmark(monkeypatch, tmp_path, "data", "--parts", "store", *LARGE, *SHORT)
    }
    assert {"npy float32", "npy float16", "npy in blocks of 32 float32"} <= set(rows)
    assert all(set(row) >= KEYS | {"MB", "write_seconds", "cold_seconds", "needs"} for row in rows.values())
    voxels = 40 * 44 * 36
    assert rows["npy float32"]["MB"] == pytest.approx((voxels * 4 + 128) / 1e6)
    assert rows["npy float16"]["MB"] == pytest.approx((voxels * 2 + 128) / 1e6)


@pytest.mark.parametrize("name", stores.formats())
@pytest.mark.parametrize("start", [(0, 0, 0), (31, 32, 1), (49, 41, 20)])
def test_a_box_across_blocks_and_at_the_edge(name: str, start: tuple[int, int, int], tmp_path: Path) -> None:
    seed = [*name.encode(), *start]  # memory that is used again must not hold the answer
    array = np.random.default_rng(seed).normal(size=(2, 70, 65, 40)).astype(np.float32)
    format = stores.formats()[name]
    format.write(tmp_path / "array", array.astype(format.dtype))
    size = (21, 24, 20)
    found = format.read(tmp_path / "array", start, size)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(
        found, stores.box_of(array.astype(format.dtype).astype(np.float32), start, size)
    )


def test_files_are_written_to_disk_before_their_pages_are_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The system may keep pages all the same, so that only the calls are certain."""
    calls: list[tuple[Any, ...]] = []

    def name(descriptor: int) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    monkeypatch.setattr(stores.os, "fsync", lambda descriptor: calls.append(("fsync", name(descriptor))))
    monkeypatch.setattr(
        stores.os, "posix_fadvise", lambda descriptor, *advice: calls.append((*advice, name(descriptor)))
    )
    for file in ("a", "inner/b"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"content")
    stores.drop(tmp_path)
    assert sorted(calls[::2]) == [("fsync", "a"), ("fsync", "b")]
    assert calls[1::2] == [(0, 0, os.POSIX_FADV_DONTNEED, name) for _, name in calls[::2]]


def test_a_patch_from_the_store_beside_whole_volumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--parts", "read", "--sets", "small", "large", *TINY, *LARGE, *SHORT]
    rows = benchmark(monkeypatch, tmp_path, "data", *arguments)
    assert len(rows) == 8 and all(set(row) >= KEYS | {"cold_seconds"} for row in rows)
    variants = {row["variant"] for row in rows}
    assert variants == {".nii.gz, whole", ".nii, whole", ".nii, memory-mapped", "our store"}
    assert all(row["ratio"] == 1 for row in rows if row["variant"] == row["reference"])


def test_means_and_not_medians_are_compared() -> None:
    cheap, dear = {"seconds": 1.0, "samples": 100}, {"seconds": 3.0, "samples": 100}
    answers = {"a": [cheap, cheap, cheap, dear], "b": [{"seconds": 1.0, "samples": 50}] * 4}
    found = contest.compared(answers, "b")
    assert found["a"]["seconds"] == pytest.approx(6 / 400) and found["a"]["ratio"] == pytest.approx(0.75)
    assert found["a"]["times_as_fast"] == pytest.approx(4 / 3) and found["b"]["ratio"] == 1
    assert found["a"]["spread"] == pytest.approx(1.0) and found["b"]["spread"] == 0


def test_only_the_work_is_timed() -> None:
    clock, done = ManualClock(), []

    def work() -> int:
        clock.wait(10.0)
        done.append(1)
        return 3

    answer = serving._piecewise(work, lambda: clock.wait(50.0), 25.0, clock)
    assert answer == {"seconds": 30.0, "samples": 9} and len(done) == 3
    assert serving._piecewise(lambda: 2, None, 0.0, clock)["samples"] == 2


def test_a_frozen_peer_and_its_worker_do_nothing_between_turns(tmp_path: Path) -> None:
    """The worker counts in a file; the peer answers once it has counted on."""
    count = tmp_path / "count"
    worker = (
        f"import itertools, time\nfor n in itertools.count(): open({str(count)!r}, "
        "'w').write(str(n)); time.sleep(0.001)"
    )
    code = f"""import pathlib, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {worker!r}])
count = pathlib.Path({str(count)!r})
count.touch()
print('{{"ready": true, "worker": ' + str(worker.pid) + '}}', flush=True)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    before = count.read_text()
    while count.read_text() in ("", before):
        pass
    print('{{"seconds": 1, "asked": "' + line.strip() + '"}}', flush=True)
"""
    with PeerProcess(sys.executable, ["-c", code], 60, frozen=True) as peer:
        group = peer._process.pid
        for request in ("run 3", "run 4"):
            wait_until(lambda: {state(group), state(peer.about["worker"])} == {"T"})
            assert peer.ask(request)["asked"] == request
        wait_until(lambda: {state(group), state(peer.about["worker"])} == {"T"})
    wait_until(lambda: not alive(group))  # the worker, too


def state(process: int) -> str:
    """One letter, T where it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Signals take effect soon after they are sent; pytest's timeout ends a wait that is in vain."""
    while not condition():
        time.sleep(0.01)


@pytest.mark.parametrize("script", [NNUNET_DATA, TORCHIO_DATA])
def test_a_script_stands_alone_and_says_what_to_install(script: tuple[str, ...], tmp_path: Path) -> None:
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1])"
    code += "; assert not {'medconv', 'torch'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, *script, str(Path(script[0]).parent)], check=True, timeout=120
    )
    sizes = ["--raw", "r", "--scratch", str(tmp_path), "--patch", "8", "8", "8", "--spacing", "1", "1", "1"]
    with (
        pytest.raises(ValueError) as error,
        PeerProcess(sys.executable, [*script, "--mode", "loader", *sizes], 300),
    ):
        pass
    message = str(error.value)
    assert sys.executable in message and "pip install" in message and "Traceback" not in message


def test_generated_cases_are_the_same_each_time_and_made_once(tmp_path: Path) -> None:
    arguments = (tmp_path, "Small", 1, (12, 20, 16), 2, (1.0, 1.0, 2.0), "CT")
    raw = datasets.generated(*arguments)
    image, label = datasets.volume((12, 20, 16), 1, "CT")
    np.testing.assert_array_equal(nib.load(raw / "imagesTr/case001_0000.nii.gz").get_fdata(), image)
    np.testing.assert_array_equal(nib.load(raw / "labelsTr/case001.nii.gz").get_fdata(), label)
    assert datasets.spacing_of(raw) == (1.0, 1.0, 2.0) and set(np.unique(label)) == {0, 1, 2}
    before = (raw / "imagesTr/case000_0000.nii.gz").stat().st_mtime_ns
    assert datasets.generated(*arguments) == raw
    assert (raw / "imagesTr/case000_0000.nii.gz").stat().st_mtime_ns == before


def test_a_decathlon_folder_is_linked(tmp_path: Path) -> None:
    root = tiny.write_dataset(tmp_path / "tiny", cases=4)
    raw = datasets.linked(tmp_path / "scratch", 1, root, 3)
    assert len(list((raw / "imagesTr").iterdir())) == len(serving.files(raw)) == 3
    assert json.loads((raw / "dataset.json").read_text())["labels"] == {"background": 0, "box": 1, "hole": 2}
    assert (raw / "imagesTr/case_0_0000.nii.gz").resolve() == (root / "imagesTr/case_0.nii.gz").resolve()
    meta = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps({**meta, "modality": {"0": "T1", "1": "T2"}}))
    with pytest.raises(ValueError, match="one channel is needed, got .'T1', 'T2'."):
        datasets.linked(tmp_path / "other", 1, root, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--core", "4096"], "--core must be one of"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--seconds", "-1"], "--seconds must be above 0, got -1"),
        (["--batches", "0"], "--batches must be at least 1, got [0]"),
        (["--small-cases", "0"], "--small-cases must be at least 1, got 0"),
        (
            ["--large-shape", "64", "96", "96"],
            "--large-patch [96, 96, 96] must fit into --large-shape [64, 96, 96]",
        ),
        (["--augment", "everything"], "--augment must be one of"),
        (
            ["--nnunet-python", "/nowhere/python"],
            "--nnunet-python: needed a python executable, got /nowhere/python",
        ),
        (["--root", "/nowhere"], "/nowhere: no such folder"),
        (["--parts", "lunch"], "invalid choice: 'lunch'"),
    ],
)
def test_options_that_cannot_be(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 1 and said in error and "Traceback" not in error
