"""scripts/benchmarks: rows that programs can read, honest timing, and comparisons that pair what belongs
together.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.benchmarks_harness import ManualClock, benchmark, commands_in_this_process

from benchmark import main
from benchmarks import convs, learning, results

KEYS = {"benchmark", "case", "variant", "reference", "ratio", "device", "hardware", "cores", "torch"}


def test_convolutions_stand_beside_the_library_in_the_same_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convs, "STAGES", {2: [(8, (8, 8))], 3: [(8, (4, 4, 4)), (16, (2, 2, 2))]})
    found = benchmark(monkeypatch, tmp_path, "convs", "--pairs", "2", "--parts", "stages", "backward")
    assert all(set(row) >= KEYS for row in found)
    stages = [row for row in found if row["benchmark"] == "stages"]
    assert {row["variant"] for row in stages} >= {
        "nn.Conv",
        "transform",
        "basis",
        "mirror",
        "acs",
        "unfold and einsum",
    }
    for row in stages:
        assert row["ratio"] > 0 and (row["variant"] != "nn.Conv" or row["ratio"] == 1)
    means = {(r["case"], r["variant"]): r["ratio"] for r in stages if "geometric mean" in r["case"]}
    single = [
        r["ratio"]
        for r in stages
        if r["variant"] == "basis" and r["case"].startswith("3D training step, ") and "mean" not in r["case"]
    ]
    assert means["3D training step, geometric mean of 2 stages", "basis"] == pytest.approx(
        np.prod(single) ** 0.5
    )
    calls = {row["variant"]: row["convolution_calls"] for row in found if row["benchmark"] == "backward"}
    assert calls["nn.Conv"] == calls["one call (ours)"] == 1 and calls["torch.nn.grad, two calls"] == 2
    assert "| nn.Conv |" in capsys.readouterr().out


def test_predictions_stand_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = benchmark(monkeypatch, tmp_path, "convs", "--pairs", "1", "--parts", "small")
    thin = [row for row in found if row["variant"] == "chain of thin layers"]
    assert len(thin) == 4
    assert thin[0]["by_operations"] == pytest.approx((64 * 14 + 14 * 15 * 9 + 15 * 64) / (64 * 64 * 9))
    assert all(row["by_operations"] < row["predicted"] for row in thin)  # launches and bytes count, too


def test_naive_code_computes_the_same() -> None:
    import torch
    from torch import nn

    for conv, size in (
        (nn.Conv2d(3, 4, 3, padding=1, bias=False), (5, 6)),
        (nn.Conv3d(2, 3, 3, padding=1, bias=False), (4, 3, 5)),
    ):
        x = torch.randn(2, conv.in_channels, *size)
        torch.testing.assert_close(convs.Unfolded(conv)(x), conv(x), rtol=1e-4, atol=1e-5)


def test_timing_alternates_and_gives_ratios() -> None:
    order: list[str] = []
    clock = ManualClock()
    variants = {
        "a": lambda: (order.append("a"), clock.wait(2.0)),
        "b": lambda: (order.append("b"), clock.wait(6.0)),
    }
    found = results.alternate(variants, "a", pairs=10, warm_up=1, clock=clock)
    assert order[:2] == ["a", "b"] and all(set(order[i : i + 2]) == {"a", "b"} for i in range(2, 22, 2))
    assert len({tuple(order[i : i + 2]) for i in range(2, 22, 2)}) == 2  # both orders occur
    assert found["a"] == {"seconds": 2.0, "ratio": 1.0, "spread": 0.0}
    assert found["b"] == {"seconds": 6.0, "ratio": 3.0, "spread": 0.0}


def test_learning_compares_case_by_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands_in_this_process(monkeypatch)
    dataset = tiny.write_dataset(tmp_path / "data", cases=10)
    monkeypatch.setattr(learning, "CHANNELS", "model.channels=[8,16,16]")
    arguments = [
        "learning",
        "--root",
        str(dataset),
        "--output",
        str(tmp_path / "runs"),
        "--variants",
        "plain",
        "ball",
    ]
    arguments += ["--cases", "3", "--seeds", "1", "--steps", "2"]
    found = benchmark(monkeypatch, tmp_path, *arguments)
    assert [row["variant"] for row in found] == ["plain", "ball"]
    splits = json.loads((tmp_path / "runs/splits-3.json").read_text())
    assert len(splits) == 1 and len(splits[0]["train"]) == 3 and len(splits[0]["val"]) == 2
    summaries = {
        v: json.loads((tmp_path / f"runs/3-2/{v}/0/summary.json").read_text()) for v in ("plain", "ball")
    }
    assert found[1]["dice"] == pytest.approx(summaries["ball"]["val/dice"], abs=0.02)
    assert found[1]["low"] <= found[1]["difference"] <= found[1]["high"]
    assert found[0]["difference"] == 0 and found[1]["million_weights"] < found[0]["million_weights"]


@pytest.mark.parametrize("cases", ["9", "0", "few"])
def test_learning_needs_as_many_cases_as_there_are(cases: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--cases must be `all` or numbers from 1 to 8, got {cases}"):
        learning._write_splits(tiny.write_dataset(tmp_path / "data", cases=10), cases, 1, tmp_path)


def test_paired_differences_take_the_seeds_that_both_have() -> None:
    plain = {0: {"a": 0.5, "b": 0.6}, 1: {"a": 0.5, "b": 0.7}}
    mine = {0: {"a": 0.6, "b": 0.7}, 2: {"a": 0.0, "b": 0.0}}
    low, high, mean = learning._paired(mine, plain)
    assert mean == pytest.approx(0.1) and low == pytest.approx(0.1) and high == pytest.approx(0.1)
    assert learning._paired({5: {"a": 1.0}}, plain) == (None, None, None)


def test_an_unknown_benchmark_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "lunch"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1 and "lunch" in capsys.readouterr().err


def test_metrics_stand_beside_monais(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    labels = tiny.write_dataset(tmp_path / "tiny") / "labelsTr"
    given = ["--labels", str(labels), "--pairs", "1", "--shape", "24", "20", "16"]
    found = benchmark(monkeypatch, tmp_path, "evaluation", *given)
    assert len(found) == 4 and all(set(row) >= KEYS for row in found)
    assert all(row["furthest_apart"] < 1e-4 for row in found)


def test_streamed_predictions_stand_beside_serial_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dataset = tiny.write_dataset(tmp_path / "tiny")
    tiny.train(dataset, tmp_path / "run", "trainer.max_steps=1")
    given = [
        "--checkpoint",
        str(tmp_path / "run/checkpoints/last.ckpt"),
        "--input",
        str(dataset / "imagesTr"),
    ]
    found = benchmark(monkeypatch, tmp_path, "prediction", *given, "--cases", "3", "--pairs", "1")
    assert [row["variant"] for row in found] == [
        "one after another",
        "streamed, 1 loading",
        "streamed, 2 loading",
    ]
    assert all(set(row) >= KEYS and row["seconds_per_case"] == row["seconds"] / 3 for row in found)


def test_what_surviving_costs_stands_beside_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = benchmark(
        monkeypatch,
        tmp_path,
        "fault_tolerance",
        "--patch",
        "16",
        "16",
        "--features",
        "4",
        "8",
        "--pairs",
        "1",
    )
    assert len(found) == 6 and found[0]["variant"] == "forward and backward"
    assert all(set(row) >= KEYS and row["seconds"] > 0 for row in found)


@pytest.mark.slow
def test_classifiers_are_measured_on_the_test_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Brighter pictures are of class 1; done runs are not repeated."""
    arrays, rng = {}, np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8), ("test", 12)):
        arrays[f"{part}_labels"] = (np.arange(count) % 2).astype(np.uint8)[:, None]
        noise = rng.integers(0, 60, (count, 16, 16))
        arrays[f"{part}_images"] = (noise + 150 * arrays[f"{part}_labels"][:, :, None]).astype(np.uint8)
    np.savez(tmp_path / "bright.npz", **arrays)
    settings = [
        "data.samples_per_epoch=24",
        "data.batch_size=8",
        "plan.channels=[4,8]",
        "trainer.accelerator=cpu",
    ]
    given = [
        "--root",
        str(tmp_path / "bright.npz"),
        "--output",
        str(tmp_path / "runs"),
        "--steps",
        "30",
        "--seeds",
        "1",
    ]
    words = [
        "classification",
        *given,
        "--variants",
        "conv=none",
        "conv=mirror,augmentation=none",
        "--set",
        *settings,
    ]
    found = benchmark(monkeypatch, tmp_path, *words)
    assert [row["variant"] for row in found] == ["conv=none", "conv=mirror,augmentation=none"]
    assert all(row["auc"] == [1.0] and len(row["accuracy"]) == 1 for row in found)
    assert benchmark(monkeypatch, tmp_path, *words)[0]["train_seconds"] == found[0]["train_seconds"]
