"""One claim in a process of its own, with its time limit: whatever happens there costs that claim alone."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gpu_checks.claims import Claim, Skip
from gpu_checks.failures import failure
from gpu_checks.setting import FORK, Setting

_LOG_CHARACTERS = 20_000  # of the log of a part that failed, in the results


def run(claim: Claim, setting: Setting) -> dict[str, Any]:
    """Measure a claim. Returns: `verdict`, `seconds`, and `figures`, `reason` or `error` and `log`."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    log, answer = setting.folder / "log", setting.folder / "answer"
    process = FORK.Process(target=_measure, args=(claim, setting, log, answer))
    begun = time.monotonic()
    process.start()
    try:
        process.join(setting.limit_s)
        late = process.is_alive()
    finally:
        _end(process.pid)
        process.join()
    result: dict[str, Any] = {"verdict": "failed", "seconds": round(time.monotonic() - begun, 1)}
    if answer.is_file():
        result |= json.loads(answer.read_text())
    elif late:
        where = f"not done after {setting.limit_s:.0f} s; the log has where it was"
        result |= {"verdict": "timed out", "error": where}
    else:
        result["error"] = f"its process {_ended(process.exitcode)}"
    if "figures" in result:
        result["verdict"] = claim.verdict(result["figures"], setting.tiny)
    if result["verdict"] in ("failed", "timed out"):
        result["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:] if log.is_file() else ""
    return result


def _measure(claim: Claim, setting: Setting, log: Path, answer: Path) -> None:
    os.setsid()  # so that all that it starts ends with it
    gc.freeze()  # looking through all that is imported would be a third of a tiny training
    file = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    faulthandler.disable()  # else a handler that another library has put in its place would stay
    faulthandler.enable(file)
    setting.watch()
    os.chdir(setting.folder)
    torch.manual_seed(0)
    content: dict[str, Any]
    try:
        content = {"figures": {name: _plain(value) for name, value in claim.measure(setting).items()}}
    except Skip as reason:
        content = {"verdict": "skipped", "reason": str(reason)}
    except BaseException as error:
        content = {"error": failure(error)}
    file.flush()
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(answer)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and value != value:
        return "nan"
    return value


def _end(pid: int | None) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid or 0, signal.SIGKILL) if pid else None


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}; the log has where it was"
    return f"ended with code {code} without an answer"
