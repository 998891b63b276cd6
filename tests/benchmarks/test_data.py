"""scripts/benchmarks/data.py at tiny sizes, with real contestants and files."""

import os
import sys

import pytest
from helpers import tiny
from helpers.benchmarks_harness import benchmark, peers_are_forked

from benchmark import main

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
def test_loaders_and_transforms_take_turns(part, ours, monkeypatch, tmp_path, capsys):
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
def test_a_peer_runs_in_its_own_environment(peer, monkeypatch, tmp_path):
    python = os.environ.get(PEERS[peer])
    if not python:
        pytest.skip(f"{PEERS[peer]} names no python that has {peer}")
    option = "--nnunet-python" if peer == "nnU-Net" else "--torchio-python"
    parts = ["loader", "transforms", *(["prepare"] if peer == "nnU-Net" else [])]
    arguments = ["--parts", *parts, "--sets", "small", *TINY, *SHORT, option, python]
    rows = benchmark(monkeypatch, tmp_path, "data", *arguments)
    peer_rows = [row for row in rows if row["variant"] == peer]
    assert [row["benchmark"] for row in peer_rows] == parts
    assert all(row["about"].startswith(peer + " ") and row["samples"] >= 2 for row in peer_rows)
    if peer == "nnU-Net":
        assert sum(row["variant"] == "nnU-Net, nearest labels" for row in rows) == 2
        assert set(peer_rows[-1]["parts"]) == {"fingerprint", "plan", "preprocess"}


def test_preparing_is_timed_per_case(monkeypatch, tmp_path):
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
    assert not list(scratch.glob("*/patch16x16x16/tmp*"))  # the timed preparation is deleted


def test_every_format_is_written_and_read(monkeypatch, tmp_path):
    rows = {
        row["variant"]: row
        for row in benchmark(monkeypatch, tmp_path, "data", "--parts", "store", *LARGE, *SHORT)
    }
    assert {"npy float32", "npy float16", "npy in blocks of 32 float32"} <= set(rows)
    assert all(set(row) >= KEYS | {"MB", "write_seconds", "cold_seconds", "needs"} for row in rows.values())
    voxels = 40 * 44 * 36
    assert rows["npy float32"]["MB"] == pytest.approx((voxels * 4 + 128) / 1e6)
    assert rows["npy float16"]["MB"] == pytest.approx((voxels * 2 + 128) / 1e6)


def test_reading_a_patch_from_the_store_is_timed_beside_whole_volumes(monkeypatch, tmp_path):
    arguments = ["--parts", "read", "--sets", "small", "large", *TINY, *LARGE, *SHORT]
    rows = benchmark(monkeypatch, tmp_path, "data", *arguments)
    assert len(rows) == 8 and all(set(row) >= KEYS | {"cold_seconds"} for row in rows)
    variants = {row["variant"] for row in rows}
    assert variants == {".nii.gz, whole", ".nii, whole", ".nii, memory-mapped", "our store"}
    assert all(row["ratio"] == 1 for row in rows if row["variant"] == row["reference"])


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_impossible_options_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 1 and message in error and "Traceback" not in error
