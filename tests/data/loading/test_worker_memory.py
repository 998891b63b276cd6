"""What a loader worker costs: one thread, and memory that depends neither on the dataset's size nor on its
fellows.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.volumes import preprocessing_config, tiny
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks import workers as benchmark
from medconv.data.case import Case
from medconv.data.loading.datamodule import DataModule
from medconv.data.preprocessing.pipeline import prepare

SLACK_MB = 12.0  # what two workers that do the same may differ by


def collecting(batch: dict[str, Any]) -> dict[str, Any]:
    """Garbage is collected now and then; here always, which is the worst that can happen to shared memory."""
    gc.collect()
    return batch


def threads(batch: dict[str, Any]) -> dict[str, Any]:
    most = max([torch.get_num_threads(), *(library["num_threads"] for library in threadpool_info())])
    return {"sample": batch["sample"], "threads": torch.tensor(most)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("workers")
    dataset = tiny(folder / "data", 4)
    return prepare(dataset, preprocessing_config(), folder / "cache", 1)


def module(store: Any, cases: int, workers: int, augment: Any = collecting) -> DataModule:
    names = [
        Case(f"case_{i % 4}", (Path(f"images/{i}.nii.gz"),), Path(f"labels/{i}.nii.gz")) for i in range(cases)
    ]
    settings: dict[str, Any] = {
        "seed": 0,
        "batch_size": 2,
        "samples_per_epoch": 400,
        "oversample_foreground": 0.5,
    }
    return DataModule(store, names, [], (6, 5, 4), augment, num_workers=workers, **settings)


def private_megabytes(store: Any, cases: int, workers: int) -> float:
    data = module(store, cases, workers)
    found = benchmark.measured(data.train_dataloader(), 10 * workers, settle_seconds=0.2)
    assert len(found) == workers
    return max(one["private_MB"] for one in found)


def test_a_worker_has_one_thread(store: Any) -> None:
    """Also where the main process has more, and in the libraries under numpy and scipy."""
    with threadpool_limits(2):
        batch = next(iter(module(store, 4, 1, threads).train_dataloader()))
    assert batch["threads"] == 1


def test_memory_does_not_grow_with_the_dataset(store: Any) -> None:
    few, many = private_megabytes(store, 4, 1), private_megabytes(store, 60_000, 1)
    assert many < few + SLACK_MB, f"{few:.0f} MB with 4 cases, {many:.0f} MB with 60,000"


def test_memory_does_not_grow_with_the_number_of_workers(store: Any) -> None:
    one, four = private_megabytes(store, 4, 1), private_megabytes(store, 4, 4)
    assert four < one + SLACK_MB, f"{one:.0f} MB alone, {four:.0f} MB among four"


def test_rows_of_the_benchmark(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    given = "--workers 1 2 --cases 2 --shape 20 18 16 --patch 8 8 8 --samples 8 --augment nothing --names 50"
    rows = benchmark.run(parser.parse_args([*given.split(), "--scratch", str(tmp_path)]))
    assert [row["workers"] for row in rows] == [1, 2]
    for row in rows:
        assert row["private_MB"] < row["pss_MB"] < row["rss_MB"] <= row["peak_rss_MB"]
        assert row["bound_MB"] == rows[0]["all_pss_MB"] + row["workers"] * row["interpreter_MB"]
        assert row["ratio"] < 1.3
    assert "50 cases of 20x18x16" in benchmark.show(rows)
