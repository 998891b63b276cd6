"""medconv/data/loading/store_check.py: damage of training cases is found while a run trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny
from helpers.stores import change_a_byte_unnoticed
from helpers.volumes import preprocessing_config
from helpers.volumes import tiny as tiny_dataset
from lightning import Callback

from medconv.data.loading import store_check
from medconv.data.loading.store_check import StoreCheck
from medconv.data.preprocessing import pipeline
from medconv.data.preprocessing.pipeline import prepare
from medconv.data.preprocessing.store import Store

CASES = ["case_0", "case_1", "case_2"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return prepare(tiny_dataset(tmp_path / "data"), preprocessing_config(), tmp_path / "cache", 1)


def checked(store: Store, step: int = 0) -> StoreCheck:
    """A check that has read all cases."""
    check = StoreCheck(store, CASES)
    check.go_on(step)
    end_of(check)
    return check


def end_of(check: StoreCheck) -> None:
    assert check._thread is not None
    check._thread.join()


@pytest.mark.parametrize("name", ["image", "label", "foreground"])
def test_a_damaged_case_is_named_and_prepared_anew(tmp_path: Path, store: Store, name: str) -> None:
    checked(store).go_on(1)  # no damage
    change_a_byte_unnoticed(store.folder / f"case_1.{name}.npy")
    check = checked(store)
    with pytest.raises(ValueError, match=f"case case_1: .*the checksum of {name} is wrong.*run again"):
        check.go_on(1)
    assert not (store.folder / "case_1.json").exists()


def test_the_step_decides_the_first_case(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[str] = []
    monkeypatch.setattr(store, "verify", lambda case, pause: cases.append(case))
    checked(store, step=7)
    assert cases == ["case_1", "case_2", "case_0"]


def test_it_takes_a_small_share_of_the_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits 49 times as long as each block took."""
    waits: list[float] = []
    check = StoreCheck(store, CASES)
    monkeypatch.setattr(check._stopped, "wait", waits.append)
    monkeypatch.setattr(store_check.Store, "verify", lambda self, case, pause: pause(2.0))
    check.go_on(0)
    end_of(check)
    assert waits == pytest.approx([98.0] * 3)


def test_a_stop_ends_the_check_within_a_case(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[str] = []

    def verify(self: Store, case: str, pause: Callable[[float], None]) -> None:
        cases.append(case)
        pause(1e6)

    check = StoreCheck(store, CASES)
    monkeypatch.setattr(store_check.Store, "verify", verify)
    check.go_on(0)
    check.stop()
    end_of(check)
    assert cases == ["case_0"]
    check.go_on(1)


def test_a_stop_does_not_wait_for_a_disk_that_never_answers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    check = StoreCheck(store, CASES)
    monkeypatch.setattr(store_check.Store, "verify", lambda self, case, pause: answer.wait())
    check.go_on(0)
    check.stop()
    answer.set()
    end_of(check)


class AfterTheCheck(Callback):
    """The second step begins once all cases were read."""

    def on_train_batch_end(self, trainer: object, *args: object) -> None:
        trainer.datamodule._check._thread.join()  # type: ignore[attr-defined]


def test_a_run_ends_and_the_next_one_prepares_the_case_anew(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_VERIFIED_AT_START", 0)  # as if the store were large
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    wait = f"+callbacks.wait._target_={__name__}.AfterTheCheck"
    tiny.train(dataset, tmp_path / "first", cache)
    (image,) = (tmp_path / "cache").glob("*/*/case_1.image.npy")
    change_a_byte_unnoticed(image)
    with pytest.raises(ValueError, match="case case_1: .*the checksum of image is wrong"):
        tiny.train(dataset, tmp_path / "run", cache, wait, "trainer.max_steps=4")
    assert tiny.train(dataset, tmp_path / "run", cache, wait, "trainer.max_steps=4")["status"] == "done"
