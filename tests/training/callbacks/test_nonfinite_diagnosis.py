"""medconv/training/callbacks/nonfinite_diagnosis.py: the first layer that is not finite is named and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.nonfinite import EXPLODES, Line, Point, line_trainer, traces

from medconv.training.callbacks.nonfinite_guard import NonfiniteError, NonfiniteGuard


def test_the_first_layer_that_is_not_finite_is_named(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        NonfiniteError,
        match=r"step 2: the loss .* network\.encoder\.0\.3 \(Conv3d\), output, .*A lower learning rate",
    ):
        tiny.train(dataset, tmp_path / "run", *EXPLODES)
    file = tmp_path / "run/nonfinite/step2.ckpt"
    ((_, *before, last),) = traces(caplog)
    assert last.startswith("network.encoder.0.3 (Conv3d)") and " of " in last
    assert any(line.startswith("network.encoder.0.1 (") and "BatchNorm3d)" in line for line in before)
    assert all(line.split("  ")[0].strip() and " of " not in line for line in before)
    with pytest.raises(ValueError, match=r"run\.resume=.*step2\.ckpt: holds weights, but no training state"):
        tiny.train(dataset, tmp_path / "other", f"run.resume={file}")


class Greedy(Line):
    """Runs out of memory when a batch is run again."""

    passes = 0

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss_of(batch)


def test_without_memory_for_another_pass_the_loss_is_named(tmp_path: Path) -> None:
    trainer = line_trainer(NonfiniteGuard(tmp_path / "nonfinite"), max_steps=4)
    with pytest.raises(
        NonfiniteError,
        match=r"step 2: the loss is not finite, of case point .*First non-finite tensor: the loss alone",
    ):
        trainer.fit(Greedy(1), torch.utils.data.DataLoader(Point()))
