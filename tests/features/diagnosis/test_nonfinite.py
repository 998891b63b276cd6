"""medconv/features/diagnosis/nonfinite.py: the first bad layer is named and saved; the rows of a forward and backward pass, and their table."""

from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.nonfinite import EXPLODES, Line, Point, line_trainer, traces
from torch import nn

from medconv import doors
from medconv.features.diagnosis.nonfinite import LayerRecord, first_bad, inputs, severity, table, trace
from medconv.training.callbacks.nonfinite_guard import NonfiniteError, NonfiniteGuard

BATCH = {"image": torch.tensor([[1.0, -2.0]]), "sample": torch.tensor([3])}


class Root(nn.Module):
    """Its gradient at 0 is infinite."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sqrt()


def network(*last):
    """A layer whose weights are 1, and a ReLU, in evaluation mode."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.ones_(layer.weight)
    return nn.Sequential(layer, nn.ReLU(), *last).eval()


def rows_of(module, scale=1.0):
    return trace(module, BATCH, lambda: module(BATCH["image"]).sum(), scale)


def test_rows_are_in_the_order_of_computation_and_the_pass_leaves_no_mark():
    module = network(nn.Linear(2, 1, bias=False))
    modes = []
    module.register_forward_pre_hook(lambda *_: modes.append(module.training))
    rows = rows_of(module, scale=8.0)
    assert [(row.name, row.kind, row.role) for row in rows] == [
        ("image", "batch", "input"),
        ("0", "Linear", "output"),
        ("1", "ReLU", "output"),
        ("2", "Linear", "output"),
        ("loss", "loss", "loss"),
        ("2", "Linear", "gradient of output"),
        ("1", "ReLU", "gradient of output"),
        ("0", "Linear", "gradient of output"),
        ("0.weight", "parameter", "gradient of weights"),
        ("2.weight", "parameter", "gradient of weights"),
    ]
    assert rows[0] == LayerRecord("image", "batch", "input", bad=0, total=2, low=-2.0, high=1.0)
    assert rows[1].low == rows[1].high == -1.0
    assert rows[5].low == rows[5].high == 8.0  # of the scaled loss
    assert first_bad(rows) is None and severity(None) > max(map(severity, rows))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert modes == [True]  # batch norm and dropout are as in the step
    assert not any(part.training or part._forward_hooks for part in module.modules())


def test_a_label_that_is_missing_is_not_what_went_wrong():
    label = torch.tensor([[1.0, torch.nan], [torch.nan, 0.0]])
    rows = inputs({"image": torch.tensor([torch.nan, 1.0]), "label": label})
    assert [(row.name, row.bad) for row in rows] == [("image", 1), ("label", 0)]
    (row,) = inputs({"label": torch.tensor([torch.inf, torch.nan])})
    assert row.bad == 1


def test_the_table_ends_at_the_first_tensor_that_is_not_finite():
    rows = rows_of(network(Root()))
    bad = first_bad(rows)
    assert bad is not None
    assert bad.words() == "1 (ReLU), gradient of output, 2 of 2 values"
    assert (bad.low, bad.high) == (None, None)
    lines = table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "image", "0", "1", "2", "loss", "2", "1"]
    assert lines[-1].split()[-5:] == ["2", "of", "2", "-", "-"]
    assert [line.split() for line in table(rows, max_rows=2).splitlines()[1:]] == [
        line.split() for line in lines[-2:]
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, torch.nan, -3.0], (1, 3, -3.0, 1.0)), ([torch.inf, -torch.inf], (2, 2, None, None))],
)
def test_a_row_counts_the_values_that_are_not_finite_and_has_the_range_of_the_others(values, expected):
    row = LayerRecord.of("image", "batch", "input", torch.tensor(values))
    assert (row.bad, row.total, row.low, row.high) == expected


def test_the_first_layer_that_is_not_finite_is_named(dataset, tmp_path, caplog):
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


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_disk_that_takes_no_batch_hides_no_reason(dataset, tmp_path, caplog, policy):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/nonfinite").touch()  # where its folder would be
    settings = [*EXPLODES, f"run.nan_policy={policy}", "trainer.max_steps=4"]
    if policy == "stop":
        with pytest.raises(NonfiniteError, match=r"step 2: the loss .* network\.encoder\.0\.3"):
            tiny.train(dataset, tmp_path / "run", *settings)
    else:
        assert tiny.train(dataset, tmp_path / "run", *settings)["status"] == "done"
    assert "nonfinite/step2.ckpt: the batch of this step cannot be written (" in caplog.text


class Greedy(Line):
    """Runs out of memory when a batch is run again."""

    passes = 0

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss_of(batch)


def test_without_memory_for_another_pass_the_loss_is_named(tmp_path):
    trainer = line_trainer(NonfiniteGuard(tmp_path / "nonfinite"), max_steps=4)
    with pytest.raises(
        NonfiniteError,
        match=r"step 2: the loss is not finite, in case point .*First non-finite tensor: the loss alone",
    ):
        trainer.fit(Greedy(1), torch.utils.data.DataLoader(Point()))


def test_without_the_feature_the_step_is_named(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(doors, "objects", lambda door: iter(()))  # as if its folder were deleted
    with pytest.raises(NonfiniteError, match=r"step 2: the loss or its gradient is not finite\. nan_policy"):
        tiny.train(dataset, tmp_path / "run", *EXPLODES)
