"""How often `perf.compile` compiles in a whole run: for training, and for the windows of validations."""

from functools import partial

import pytest
import torch
from helpers import tiny
from torch._dynamo.testing import CompileCounterWithBackend

from medconv.performance import switches

SETTINGS = (
    "perf.compile=true",
    "data.patch_size=[16,16,16]",
    "model.channels=[4,4,4]",
    "model.strides=[2,2]",
    "trainer.max_steps=10",
    "data.samples_per_epoch=10",
)


def symbolic_sizes(graph):
    """Inputs of a graph that are sizes; none if it was compiled for one shape."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return sum(isinstance(node.meta["example_value"], torch.SymInt) for node in inputs)


@pytest.fixture
def counter(monkeypatch):
    """Counts what is compiled, and runs it as it is."""
    monkeypatch.setattr(switches, "compiler_missing", lambda: None)
    counting = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    torch.compiler.reset()
    return counting


def test_a_run_with_whole_patches_compiles_twice_for_one_shape_each(counter, dataset, tmp_path):
    """Although training batches of 2 are not as large as the batches of windows, and the last one of a case
    holds fewer."""
    tiny.train(dataset, tmp_path / "run", *SETTINGS, "task.sw_batch_size=3")
    assert counter.frame_count == 2
    assert [symbolic_sizes(graph) for graph in counter.graphs] == [0, 0]


@pytest.mark.parametrize("sanity_steps", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_growing_patches_compiles_at_most_three_times(counter, dataset, tmp_path, sanity_steps):
    """For the first size, for any size, and for validations; patches have three sizes here."""
    sizes = tmp_path / "sizes"
    spy = ["+callbacks.sizes._target_=helpers.tiny.Sizes", f"+callbacks.sizes.path={sizes}"]
    grows = ["schedule.patch=progressive", f"trainer.num_sanity_val_steps={sanity_steps}"]
    tiny.train(dataset, tmp_path / "run", *SETTINGS, *grows, *spy)
    assert len({*sizes.read_text().splitlines()}) == 3
    assert counter.frame_count == 3 - (sanity_steps > 0)
