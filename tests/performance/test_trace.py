"""medconv/performance/trace.py: a trace of steps, and the time of each layer in it."""

import logging
from types import SimpleNamespace

import torch
from torch import nn

from medconv.convs import smooth
from medconv.performance.trace import Trace, layer_ranges, layer_seconds


def test_a_run_too_short_for_a_trace_gives_a_warning(tmp_path, caplog):
    trainer = SimpleNamespace(is_global_zero=True)
    trace = Trace(tmp_path, skip=3)
    trace.on_train_start(trainer, trainer)
    trace.on_train_batch_end(trainer, trainer, None, None, 0)
    trace.on_train_end(trainer, trainer)
    assert "the profiler wrote no trace: recording starts after 5 batches" in caplog.text


def test_layers_have_their_names_and_their_backward_pass(tmp_path, caplog):
    """Of a plain layer, a parametrized one, and one hundred times as large as the others."""
    caplog.set_level(logging.INFO)
    network = nn.Sequential(nn.Conv2d(1, 2, 1), smooth(nn.Conv2d(2, 2, 3, padding=1), throughout=True))
    network.append(nn.ModuleDict({"large": nn.Conv2d(2, 64, 5, padding=2)})["large"])
    trainer = SimpleNamespace(is_global_zero=True)
    task = SimpleNamespace(network=network)
    trace = Trace(tmp_path, skip=0, steps=2)
    trace.on_train_start(trainer, task)
    for step in range(4):
        network(torch.ones(2, 1, 64, 64)).sum().backward()
        trace.on_train_batch_end(trainer, task, None, None, step)
    trace.on_train_end(trainer, task)
    assert not any(module._forward_hooks for module in network.modules())
    [message] = [
        record.getMessage() for record in caplog.records if record.name == "medconv.performance.trace"
    ]
    assert message.startswith("profile: share of the time of all layers, forward and backward: 2 ")
    [file] = tmp_path.glob("*.json")
    text = file.read_text()
    assert all(f'"layer {number}"' in text for number in range(3)) and "parametrizations" not in text


def test_a_backward_pass_is_counted_with_its_layer():
    """With one microsecond for each event: the forward pass, and the nodes of its two operators."""
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.profiler.profile() as profile, layer_ranges(network):
        network(torch.ones(4, 2)).sum().backward()
    events = [
        SimpleNamespace(
            name=event.name,
            sequence_nr=event.sequence_nr,
            time_range=event.time_range,
            device_time_total=0,
            cpu_time_total=1,
        )
        for event in profile.events()
    ]
    seconds = layer_seconds(events)
    assert {layer: round(value * 1e6) for layer, value in seconds.items()} == {"0": 3, "2": 3}


def test_a_compiled_network_keeps_its_code():
    network = nn.Sequential(nn.Linear(2, 2))
    network.compile(backend="eager")
    with layer_ranges(network):
        assert not network[0]._forward_hooks
