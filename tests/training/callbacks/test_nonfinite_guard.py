"""medconv/training/callbacks/nonfinite_guard.py: which steps stop a run or are skipped, and what is saved."""

import copy
import os
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ranks, tiny
from helpers.nonfinite import EXPLODES, Line, Point, line_trainer, traces
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision

from medconv.data.preprocessing.store import Store
from medconv.training.callbacks import nonfinite_guard
from medconv.training.callbacks.nonfinite_guard import NonfiniteError, NonfiniteGuard
from medconv.training.checkpoint import resumable_loop
from medconv.utils.exit_codes import DONE, USER

ONE_EACH = ["data.batch_size=1", "data.samples_per_epoch=8", "trainer.max_steps=8"]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A dataset whose preprocessed case_2 is infinite; time, size and checksum of the file do not show it."""
    root = tiny.write_dataset(tmp_path_factory.mktemp("poisoned") / "tiny")
    tiny.train(root, root.parent / "first", "trainer.max_steps=1")
    (image,) = (root.parent / "prepared").rglob("case_2.image.npy")
    before, array = image.stat(), np.load(image, mmap_mode="r+")
    array[:] = np.inf
    array.flush()
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    store = Store(image.parent)
    record = store._record("case_2")
    record["arrays"]["image"]["crc32"] = zlib.crc32(image.read_bytes())
    store._commit("case_2", record)
    return root


class States(Callback):
    """Copies the whole checkpoint after each step, and notes the cases of each batch."""

    def __init__(self) -> None:
        self.after = []
        self.cases = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.after.append(copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(weights_only=False)))
        dataset = trainer.train_dataloader.dataset.dataset
        self.cases.append([dataset.case_of(int(n)) for n in batch["sample"]])


@pytest.fixture
def states(monkeypatch):
    """Records the run that follows, after the averages of the weights are updated."""
    recorder = States()
    trainer = resumable_loop.ResumableTrainer

    def with_states(*arguments, **settings):
        recorder.__init__()
        return trainer(*arguments, **{**settings, "callbacks": [*settings["callbacks"], recorder]})

    monkeypatch.setattr(resumable_loop, "ResumableTrainer", with_states)
    return recorder


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def part_of(content, key):
    """A part of a checkpoint; of optimizers the states, without the learning rate of the schedule."""
    return [one["state"] for one in content[key]] if key == "optimizer_states" else content[key]


KEPT = ("state_dict", "current_model_state", "averaging_state", "optimizer_states")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_is_not_finite_stops_the_run_and_is_named(poisoned, tmp_path, workers, caplog):
    with pytest.raises(NonfiniteError) as caught:
        tiny.train(poisoned, tmp_path / "run", *ONE_EACH, f"data.num_workers={workers}")
    message = str(caught.value)
    file = tmp_path / f"run/nonfinite/{message.split(':')[0].replace(' ', '')}.ckpt"
    assert file.is_file()
    assert (
        "in case case_2 (training sample " in message
        and "First non-finite tensor: image (batch), input" in message
    )
    assert f"The batch and its layer trace are in {file}." in message and " nan_policy=skip" in message
    saved = torch.load(file, weights_only=True)
    record, rows = saved["nonfinite"], saved["nonfinite"]["rows"]
    assert record["cases"] == [message.split("in case ")[1].split(". First")[0]]
    assert rows[0]["name"] == "image" and rows[0]["bad"] > 0
    assert {row["role"] for row in rows} > {"output", "loss", "gradient of output"}
    (trace,) = traces(caplog)
    assert len(trace) == 2 and trace[1].startswith("image (batch)  input")
    # the weights before the step
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.parametrize(
    "settings", [["optimizer=muon"], ["optimizer=adamw"], ["optimizer=sgd", "optimizer.lr=1e-3"]]
)
def test_a_skipped_step_changes_nothing(poisoned, tmp_path, states, settings):
    summary = tiny.train(poisoned, tmp_path / "run", *ONE_EACH, *settings, "run.nan_policy=skip")
    assert summary["status"] == "done" and summary["steps"] == 8
    bad = [step for step, cases in enumerate(states.cases) if "case_2" in cases]
    assert bad and 0 < bad[0] < 7
    for step in range(1, 8):
        before, after = states.after[step - 1], states.after[step]
        for key in KEPT[1:] if step in bad or step <= 4 else ["current_model_state"]:
            assert same(part_of(before, key), part_of(after, key)) == (step in bad), (step, bad, key)
    assert states.after[-1]["callbacks"]["NonfiniteGuard"]["skipped"] == len(bad)
    assert [p.name for p in (tmp_path / "run/nonfinite").iterdir()] == [f"step{bad[0] + 1}.ckpt"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_norm_that_is_read_a_step_later_gives_the_same_run(poisoned, tmp_path, optimizer, monkeypatch):
    """As on a GPU, where the optimizer itself skips the step. The last step is one of them."""
    settings = [
        *ONE_EACH,
        f"optimizer={optimizer}",
        "optimizer.lr=1e-3",
        "run.nan_policy=skip",
        "weight_averaging.begin=1",
        "weight_averaging.every=1",
    ]
    contents = []
    for late in (False, True):
        monkeypatch.setattr("medconv.training.trainer.NonfiniteGuard", partial(NonfiniteGuard, late=late))
        tiny.train(poisoned, tmp_path / f"late{late}", *settings)
        contents.append(torch.load(tmp_path / f"late{late}/checkpoints/last.ckpt", weights_only=True))
    for key in (*KEPT, "lr_schedulers"):
        assert same(contents[0][key], contents[1][key]), key
    assert [content["callbacks"]["NonfiniteGuard"]["skipped"] for content in contents] == [2, 2]


def test_a_late_norm_stops_with_the_weights_before_the_step(poisoned, tmp_path, monkeypatch):
    messages, weights = [], []
    for late in (False, True):
        monkeypatch.setattr("medconv.training.trainer.NonfiniteGuard", partial(NonfiniteGuard, late=late))
        with pytest.raises(NonfiniteError) as caught:
            tiny.train(poisoned, tmp_path / "run", *ONE_EACH, "run.resume=never")
        messages.append(str(caught.value))
        (file,) = (tmp_path / "run/nonfinite").iterdir()
        weights.append(torch.load(file, weights_only=True)["state_dict"])
    assert messages[0] == messages[1] and same(*weights)


def test_one_more_than_max_skipped_steps_stops_the_run(dataset, tmp_path):
    skips = ["run.nan_policy=skip", "run.max_skipped_steps=2", "trainer.max_steps=9"]
    with pytest.raises(
        NonfiniteError, match=r"^step 4: .*Skipped steps before this one: 2 \(max_skipped_steps=2\)"
    ):
        tiny.train(dataset, tmp_path / "run", *EXPLODES, *skips)
    assert sorted(p.name for p in (tmp_path / "run/nonfinite").iterdir()) == ["step2.ckpt", "step4.ckpt"]


def test_the_bad_one_of_accumulated_batches_is_named(poisoned, tmp_path):
    with pytest.raises(
        NonfiniteError,
        match=r"in case case_2 \(training sample \d+\)\. First non-finite tensor: image \(batch\)",
    ):
        tiny.train(poisoned, tmp_path / "run", *ONE_EACH, "trainer.accumulate_grad_batches=4")
    (file,) = (tmp_path / "run/nonfinite").iterdir()
    assert torch.load(file, weights_only=True)["nonfinite"]["rows"][0]["bad"]


class Flat(torch.nn.Module):
    """A finite loss with a non-finite gradient."""

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (logits * 0).sum().sqrt()


class Endless(torch.nn.Module):
    """A non-finite loss with a finite gradient."""

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return logits.mean() + (torch.inf if logits.requires_grad and len(logits) == 2 else 0)


@pytest.mark.parametrize(
    ("loss", "message"), [("Flat", "the gradient is not finite"), ("Endless", "the loss is not finite")]
)
def test_a_bad_loss_or_a_bad_gradient_is_enough(dataset, tmp_path, loss, message):
    settings = [f"loss._target_=tests.training.callbacks.test_nonfinite_guard.{loss}"]
    with pytest.raises(NonfiniteError, match=message):
        tiny.train(dataset, tmp_path / "run", *settings)
    file = tmp_path / "run/nonfinite/step1.ckpt"
    assert any(row["bad"] for row in torch.load(file, weights_only=True)["nonfinite"]["rows"])


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_skip_and_stop_together(poisoned, tmp_path, strategy):
    """One rank has the bad batch: both skip the first such step, and both stop at the second."""
    two = [
        "trainer.devices=2",
        f"trainer.strategy={strategy}",
        "run.nan_policy=skip",
        "run.max_skipped_steps=1",
    ]
    arguments = [*tiny.overrides(poisoned, *ONE_EACH, *two), f"run.dir={tmp_path / 'run'}"]
    ended = ranks.run(*arguments, cwd=tmp_path)
    output = "".join(ended.stdout + ended.stderr)
    assert ended.codes == [USER, USER] and output.count("error:") == 1, output
    lines = [line for line in output.splitlines() if "is not finite on rank" in line]
    assert "skipped (1 of at most 1)" in lines[0] and "error: step" in lines[-1], output
    assert all("in case case_2 (training sample" in line for line in lines)
    files = sorted((tmp_path / "run/nonfinite").iterdir())
    assert len(files) == 2
    for file, line in zip(files, (lines[0], lines[-1]), strict=True):
        content = torch.load(file, weights_only=True)
        record = content["nonfinite"]
        assert (
            f"step {record['step']}: the loss is not finite on rank {record['rank']}, " in line
            and record["rows"][0]["bad"]
        )
        assert all(v.isfinite().all() for v in content["state_dict"].values())


@pytest.mark.parametrize(
    ("override", "message"), [("run.nan_policy=ignore", "stop"), ("run.max_skipped_steps=0", "at least 1")]
)
def test_settings_out_of_range_are_errors(dataset, tmp_path, override, message):
    with pytest.raises(ValueError, match=rf"{override.split('=')[0]} must be .*{message}"):
        tiny.train(dataset, tmp_path / "run", override)


@pytest.mark.parametrize("fails_at", [-1, 30])
def test_a_step_that_the_loss_scale_skips_is_no_error(tmp_path, fails_at):
    """A scale that is too large for fp16 is lowered; a non-finite loss is an error under any scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    guard = NonfiniteGuard(tmp_path / "nonfinite")
    trainer = line_trainer(guard, max_steps=40, plugins=[plugin])
    module = Line(fails_at)
    before = module.layer.weight.item()
    if fails_at < 0:
        trainer.fit(module, torch.utils.data.DataLoader(Point()))
        assert scaler.get_scale() < 2.0**30 and module.layer.weight.item() != before and guard.skipped == 0
    else:
        with pytest.raises(NonfiniteError, match="step 31: the loss is not finite, in case point"):
            trainer.fit(module, torch.utils.data.DataLoader(Point()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_skipped_under_a_loss_scale(tmp_path, fused):
    """Also if the optimizer unscales the gradients itself, so that the scaler checks them in the step only."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))
    guard, module = NonfiniteGuard(tmp_path / "nonfinite", "skip"), Line(3, fused)
    trainer = line_trainer(guard, max_epochs=1, limit_train_batches=6, plugins=[plugin])
    trainer.fit(module, torch.utils.data.DataLoader(Point()))
    assert guard.skipped == 1 and trainer.global_step == 6
    assert module.layer.weight.isfinite().all()


def test_the_first_step_with_momentum_is_not_read_later(tmp_path):
    """Fused SGD would have undefined buffers if the device skipped that step."""
    guard, parameter = NonfiniteGuard(tmp_path, late=True), torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    for momentum, late in [(0.9, False), (0.0, True)]:
        optimizer = torch.optim.SGD([parameter], 0.1, momentum, fused=True)
        assert guard._reads_late(optimizer, None) == late
        optimizer.step()
        assert guard._reads_late(optimizer, None)


def test_only_one_process_that_lightning_started_ends_with_an_error(tmp_path, monkeypatch):
    guard = NonfiniteGuard(tmp_path)
    guard._trainer = SimpleNamespace(is_global_zero=False)
    with pytest.raises(SystemExit) as ended:
        guard._stop("")
    assert ended.value.code == DONE
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as ended:
        guard._stop("")
    assert ended.value.code == USER


def test_which_optimizers_can_skip_a_step():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert nonfinite_guard.can_skip_step(torch.optim.AdamW(parameters, fused=True))
    assert not nonfinite_guard.can_skip_step(torch.optim.AdamW(parameters))
    assert not nonfinite_guard.can_skip_step(torch.optim.RMSprop(parameters))
