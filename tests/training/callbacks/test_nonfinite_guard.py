"""Losses and gradients that are not finite: what stops, what is skipped, what is named, logged and saved."""

import copy
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import ranks, tiny
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision

from medconv.training.callbacks import nonfinite_guard
from medconv.training.callbacks.nonfinite_guard import NonfiniteError, NonfiniteGuard
from medconv.training.tasks.segmentation import Segmentation
from medconv.utils.exit_codes import DONE, USER

EXPLODES = ["optimizer=sgd", "optimizer.lr=1e30", "trainer.gradient_clip_val=null"]
ONE_EACH = ["data.batch_size=1", "data.samples_per_epoch=8", "trainer.max_steps=8"]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose case_2 holds infinity once it is prepared, as time and size of the file do not tell."""
    root = tiny.write_dataset(tmp_path_factory.mktemp("poisoned") / "tiny")
    tiny.train(root, root.parent / "first", "trainer.max_steps=1")
    (image,) = (root.parent / "prepared").rglob("case_2.image.npy")
    before, array = image.stat(), np.load(image, mmap_mode="r+")
    array[:] = np.inf
    array.flush()
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    return root


class States(Callback):
    """Copies of all that a step may change, after each; and which cases it saw."""

    def __init__(self) -> None:
        self.after: list[Any] = []
        self.cases: list[list[str]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.after.append(copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(weights_only=False)))
        dataset = trainer.train_dataloader.dataset.dataset
        self.cases.append([dataset.case_of(int(n)) for n in batch["sample"]])


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> States:
    """Of the run that follows, after the mean of the weights has been updated."""
    found = States()
    trainer = L.Trainer

    def with_states(**settings: Any) -> L.Trainer:
        found.__init__()  # type: ignore[misc]
        return trainer(**{**settings, "callbacks": [*settings["callbacks"], found]})

    monkeypatch.setattr(L, "Trainer", with_states)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def held(content: dict[str, Any], key: str) -> Any:
    """A part of a checkpoint; of optimizers what they remember, without the learning rate of the schedule."""
    return [one["state"] for one in content[key]] if key == "optimizer_states" else content[key]


KEPT = ("state_dict", "current_model_state", "averaging_state", "optimizer_states")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_is_not_finite_stops_the_run_and_is_named(
    poisoned: Path, tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NonfiniteError) as caught:
        tiny.train(poisoned, tmp_path / "run", *ONE_EACH, f"data.num_workers={workers}")
    said = str(caught.value)
    file = tmp_path / f"run/nonfinite/{said.split(':')[0].replace(' ', '')}.ckpt"
    assert file.is_file()
    assert (
        "of case case_2 (training sample " in said and "First non-finite tensor: image (batch), input" in said
    )
    assert f"The batch and its layer trace are in {file}." in said and "run.nan_policy=skip" in said
    saved = torch.load(file, weights_only=True)
    about, rows = saved["nonfinite"], saved["nonfinite"]["rows"]
    assert about["cases"] == [said.split("of case ")[1].split(". First")[0]]
    assert rows[0]["name"] == "image" and rows[0]["bad"] > 0
    assert {row["what"] for row in rows} > {"output", "loss", "gradient of output"}
    (trace,) = traces(caplog)
    assert len(trace) == 2 and trace[1].startswith("image (batch)  input")
    assert all(
        value.isfinite().all() for value in saved["state_dict"].values()
    )  # the weights before the step


def traces(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """The lines of each layer trace in the log, without the one above them."""
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "medconv.training.callbacks.nonfinite_guard"
    ]
    return [
        text.splitlines()[1:] for text in said if "layer by layer up to the first non-finite tensor:" in text
    ]


def test_weights_that_grow_name_the_first_layer(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        NonfiniteError,
        match=r"step 2: the loss .* network\.encoder\.0\.3 \(Conv3d\), output, .*A lower optimizer.lr",
    ):
        tiny.train(dataset, tmp_path / "run", *EXPLODES)
    file = tmp_path / "run/nonfinite/step2.ckpt"
    ((_, *before, last),) = traces(caplog)
    assert last.startswith("network.encoder.0.3 (Conv3d)") and " of " in last
    assert any(line.startswith("network.encoder.0.1 (BatchNorm3d)") for line in before)
    assert all(line.split("  ")[0].strip() and " of " not in line for line in before)
    with pytest.raises(ValueError, match=r"run\.resume=.*step2\.ckpt: holds weights, but no training state"):
        tiny.train(dataset, tmp_path / "other", f"run.resume={file}")


@pytest.mark.parametrize(
    "settings", [["optimizer=muon"], ["optimizer=adamw"], ["optimizer=sgd", "optimizer.lr=1e-3"]]
)
def test_a_skipped_step_changes_nothing(
    poisoned: Path, tmp_path: Path, states: States, settings: list[str]
) -> None:
    summary = tiny.train(poisoned, tmp_path / "run", *ONE_EACH, *settings, "run.nan_policy=skip")
    assert summary["status"] == "done" and summary["steps"] == 8
    bad = [step for step, cases in enumerate(states.cases) if "case_2" in cases]
    assert bad and 0 < bad[0] < 7
    for step in range(1, 8):
        before, after = states.after[step - 1], states.after[step]
        for key in KEPT[1:] if step in bad or step <= 4 else ["current_model_state"]:
            assert same(held(before, key), held(after, key)) == (step in bad), (step, bad, key)
    assert states.after[-1]["callbacks"]["NonfiniteGuard"]["skipped"] == len(bad)
    assert [p.name for p in (tmp_path / "run/nonfinite").iterdir()] == [f"step{bad[0] + 1}.ckpt"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "sgd"])
def test_a_norm_that_is_read_late_gives_the_same_run(
    poisoned: Path, tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the optimizer itself leaves out the step. The last step is one of them."""
    settings = [
        *ONE_EACH,
        f"optimizer={optimizer}",
        "optimizer.lr=1e-3",
        "run.nan_policy=skip",
        "weight_averaging.begin=1",
        "weight_averaging.every=1",
    ]
    found = []
    for late in (False, True):
        monkeypatch.setattr("medconv.training.build.NonfiniteGuard", partial(NonfiniteGuard, late=late))
        tiny.train(poisoned, tmp_path / f"late{late}", *settings)
        found.append(torch.load(tmp_path / f"late{late}/checkpoints/last.ckpt", weights_only=True))
    for key in (*KEPT, "lr_schedulers"):
        assert same(found[0][key], found[1][key]), key
    assert [one["callbacks"]["NonfiniteGuard"]["skipped"] for one in found] == [2, 2]


def test_a_late_norm_stops_with_the_weights_before_the_step(
    poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, weights = [], []
    for late in (False, True):
        monkeypatch.setattr("medconv.training.build.NonfiniteGuard", partial(NonfiniteGuard, late=late))
        with pytest.raises(NonfiniteError) as caught:
            tiny.train(poisoned, tmp_path / "run", *ONE_EACH, "run.resume=never")
        words.append(str(caught.value))
        (file,) = (tmp_path / "run/nonfinite").iterdir()
        weights.append(torch.load(file, weights_only=True)["state_dict"])
    assert words[0] == words[1] and same(*weights)


def test_only_so_many_steps_are_skipped(dataset: Path, tmp_path: Path) -> None:
    skips = ["run.nan_policy=skip", "run.max_skipped_steps=2", "trainer.max_steps=9"]
    with pytest.raises(
        NonfiniteError, match=r"^step 4: .*Skipped steps before this one: 2 \(run.max_skipped_steps=2\)"
    ):
        tiny.train(dataset, tmp_path / "run", *EXPLODES, *skips)
    assert sorted(p.name for p in (tmp_path / "run/nonfinite").iterdir()) == ["step2.ckpt", "step4.ckpt"]


def test_of_accumulated_batches_the_bad_one_is_named(poisoned: Path, tmp_path: Path) -> None:
    with pytest.raises(
        NonfiniteError,
        match=r"of case case_2 \(training sample \d+\)\. First non-finite tensor: image \(batch\)",
    ):
        tiny.train(poisoned, tmp_path / "run", *ONE_EACH, "trainer.accumulate_grad_batches=4")
    (file,) = (tmp_path / "run/nonfinite").iterdir()
    assert torch.load(file, weights_only=True)["nonfinite"]["rows"][0]["bad"]


class Flat(torch.nn.Module):
    """A loss that is finite, of a gradient that is not."""

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (logits * 0).sum().sqrt()


class Endless(torch.nn.Module):
    """A loss that is not finite, of a gradient that is."""

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return logits.mean() + (torch.inf if logits.requires_grad and len(logits) == 2 else 0)


@pytest.mark.parametrize(
    ("loss", "said"), [("Flat", "the gradient is not finite"), ("Endless", "the loss is not finite")]
)
def test_either_is_enough(dataset: Path, tmp_path: Path, loss: str, said: str) -> None:
    own = [
        f"loss._target_=tests.training.callbacks.test_nonfinite_guard.{loss}",
        "~loss.dice_weight",
        "~loss.ce_weight",
    ]
    with pytest.raises(NonfiniteError, match=said):
        tiny.train(dataset, tmp_path / "run", *own)
    file = tmp_path / "run/nonfinite/step1.ckpt"
    assert any(row["bad"] for row in torch.load(file, weights_only=True)["nonfinite"]["rows"])


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_agree(poisoned: Path, tmp_path: Path, strategy: str) -> None:
    """One of the ranks has the bad batch: both leave the first such step out, and both stop at the second."""
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
    said = [line for line in output.splitlines() if "is not finite on rank" in line]
    assert "skipped (1 of at most 1)" in said[0] and "error: step" in said[-1], output
    assert all("of case case_2 (training sample" in line for line in said)
    files = sorted((tmp_path / "run/nonfinite").iterdir())
    assert len(files) == 2
    for file, line in zip(files, (said[0], said[-1]), strict=True):
        content = torch.load(file, weights_only=True)
        about = content["nonfinite"]
        assert (
            f"step {about['step']}: the loss is not finite on rank {about['rank']}, " in line
            and about["rows"][0]["bad"]
        )
        assert all(v.isfinite().all() for v in content["state_dict"].values())


@pytest.mark.parametrize(
    ("override", "wanted"), [("run.nan_policy=ignore", "stop"), ("run.max_skipped_steps=0", "at least 1")]
)
def test_settings_out_of_range(dataset: Path, tmp_path: Path, override: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=rf"{override.split('=')[0]} must be .*{wanted}"):
        tiny.train(dataset, tmp_path / "run", override)


class Line(L.LightningModule):
    """A line through one point, whose loss becomes NaN at a step."""

    def __init__(self, fails_at: int, fused: bool = False) -> None:
        super().__init__()
        self.layer, self.fails_at, self.record, self.fused = torch.nn.Linear(1, 1), fails_at, {}, fused
        self.gradient_seen: Any = None

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        loss = self.layer(batch["image"]).float().square().mean() * 1e-3
        return loss * (torch.nan if self.trainer.global_step == self.fails_at else 1)

    training_step = lambda self, batch, index: self.loss_of(batch)  # noqa: E731
    configure_gradient_clipping = Segmentation.configure_gradient_clipping

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.parameters(), 1e-3, fused=True)
            if self.fused
            else torch.optim.SGD(self.parameters(), 1e-3)
        )


class Point(torch.utils.data.Dataset):
    dataset = property(lambda self: self)
    describe = staticmethod(lambda n: ("point", f"training sample {n}"))
    __len__ = lambda self: 40  # noqa: E731
    __getitem__ = lambda self, n: {"image": torch.ones(1), "sample": n}  # noqa: E731


@pytest.mark.parametrize("fails_at", [-1, 30])
def test_what_the_loss_scale_skips_is_no_fault(tmp_path: Path, fails_at: int) -> None:
    """A scale that is too large for fp16 comes down by itself; a loss that is not finite is a fault under
    a scale as well.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # type: ignore[attr-defined]
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    guard = NonfiniteGuard(tmp_path / "nonfinite")
    trainer = L.Trainer(accelerator="cpu", max_steps=40, plugins=[plugin], callbacks=[guard], **settings)
    module = Line(fails_at)
    before = module.layer.weight.item()
    if fails_at < 0:
        trainer.fit(module, torch.utils.data.DataLoader(Point()))
        assert scaler.get_scale() < 2.0**30 and module.layer.weight.item() != before and guard.skipped == 0
    else:
        with pytest.raises(NonfiniteError, match="step 31: the loss is not finite, of case point"):
            trainer.fit(module, torch.utils.data.DataLoader(Point()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_skipped_under_a_loss_scale(tmp_path: Path, fused: bool) -> None:
    """Also where the optimizer takes the scale itself, and the scaler so looks at gradients as late as in
    the step.
    """
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))  # type: ignore[attr-defined]
    guard, module = NonfiniteGuard(tmp_path / "nonfinite", "skip"), Line(3, fused)
    trainer = line_trainer(guard, max_epochs=1, limit_train_batches=6, plugins=[plugin])
    trainer.fit(module, torch.utils.data.DataLoader(Point()))
    assert guard.skipped == 1 and trainer.global_step == 6
    assert module.layer.weight.isfinite().all()


def line_trainer(guard: NonfiniteGuard, **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", callbacks=[guard], enable_model_summary=False, **quiet, **settings)


class Greedy(Line):
    """Its pass runs out of memory when it is run once more."""

    passes = 0

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss_of(batch)


def test_a_second_pass_without_memory_does_not_hide_what_is_known(tmp_path: Path) -> None:
    trainer = line_trainer(NonfiniteGuard(tmp_path / "nonfinite"), max_steps=4)
    with pytest.raises(
        NonfiniteError,
        match=r"step 2: the loss is not finite, of case point .*First non-finite tensor: the loss alone",
    ):
        trainer.fit(Greedy(1), torch.utils.data.DataLoader(Point()))


def test_a_first_step_of_momentum_is_read_at_once(tmp_path: Path) -> None:
    """Fused SGD leaves its buffers undefined where the device leaves that step out."""
    guard, parameter = NonfiniteGuard(tmp_path, late=True), torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    for momentum, late in [(0.9, False), (0.0, True)]:
        optimizer = torch.optim.SGD([parameter], 0.1, momentum, fused=True)
        assert guard._reads_late(optimizer, None) == late
        optimizer.step()
        assert guard._reads_late(optimizer, None)


def test_of_processes_that_lightning_started_one_alone_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = NonfiniteGuard(tmp_path)
    guard._trainer = SimpleNamespace(is_global_zero=False)  # type: ignore[assignment]
    with pytest.raises(SystemExit) as ended:
        guard._stop("")
    assert ended.value.code == DONE
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as ended:
        guard._stop("")
    assert ended.value.code == USER


def test_what_an_optimizer_leaves_out_by_itself() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert nonfinite_guard.can_skip_step(torch.optim.AdamW(parameters, fused=True))
    assert not nonfinite_guard.can_skip_step(torch.optim.AdamW(parameters))
    assert not nonfinite_guard.can_skip_step(torch.optim.RMSprop(parameters))
