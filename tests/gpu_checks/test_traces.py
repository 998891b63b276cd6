"""scripts/gpu_checks/traces.py: waiting for the device, found in a trace of torch.profiler."""

import json

from gpu_checks.traces import waits


def event(name, start, seconds, thread=1):
    return {"ph": "X", "name": name, "ts": start, "dur": seconds, "tid": thread}


def test_waits_inside_steps_are_counted_with_what_called_them(tmp_path):
    events = [
        event("ProfilerStep#1", 0, 100),
        event("ProfilerStep#2", 100, 100),
        event("aten::item", 10, 20),
        event("aten::_local_scalar_dense", 11, 15),
        event("cudaStreamSynchronize", 12, 5),
        event("cudaEventSynchronize", 20, 5),
        event("aten::other", 12, 5, thread=2),
        event("cudaDeviceSynchronize", 250, 5),  # after the steps
        {"ph": "i", "name": "cudaStreamSynchronize", "ts": 20},
    ]
    (tmp_path / "one.pt.trace.json").write_text(json.dumps({"traceEvents": events}))
    found = waits(tmp_path)
    assert found["waits in a step"] == 0.5 and found["steps in the trace"] == 2
    assert found["where"] == "aten::_local_scalar_dense in aten::item (1)"
