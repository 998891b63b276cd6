"""Times training steps with each choice of switches: the fastest that gives the right loss is first."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn

from medconv.features.autotune.trial import Choice, Trial, Work
from medconv.utils.errors import first_line
from medconv.utils.hardware import compiler_missing, out_of_memory, resolve_precision

_ROUNDS = 7  # timed steps of a candidate, at most
# A candidate slower than the best so far by this factor is not timed again.
_TOO_SLOW = 1.25
# A later candidate replaces the best only if it takes less than this share of its time.
_TIE = 0.97
# Of the loss, relative to plain fp32's.
_TOLERANCE = {"32-true": 1e-3, "bf16-mixed": 3e-2, "16-mixed": 1e-2}
_MEMORY_SHARE = 0.92  # of the device's memory, that a candidate may use
# A larger batch must take less than this share of the time per sample.
_CHEAPER = 0.95

log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """A choice and its measurement: seconds of its steps, or a remark why it was rejected."""

    choice: Choice
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    remark: str = ""
    trial: Trial | None = None

    @property
    def per_sample(self) -> float:
        """Seconds; infinite if it is rejected or not yet timed."""
        if self.remark or not self.seconds:
            return math.inf
        return median(self.seconds) / self.batch_size

    def row(self) -> dict[str, Any]:
        """Plain values."""
        is_timed = math.isfinite(self.per_sample)
        return {
            "choice": asdict(self.choice),
            "batch_size": self.batch_size,
            "seconds": self.per_sample * self.batch_size if is_timed else None,
            "memory_bytes": self.memory_bytes,
            "remark": self.remark,
        }


def choices(set_by_user: dict[str, Any], network: nn.Module, gpu: bool) -> list[Choice]:
    """The candidates, plain ones first.

    Args:
        set_by_user: fields of `Choice`; values that are not None stay.
        network: whose layers decide which switches matter.
        gpu: whether it trains on one.
    """
    # On a CPU, fast_norm leaves the work of batch norms to torch
    batch_norms = (nn.BatchNorm2d, nn.BatchNorm3d) if gpu else ()
    kinds = (nn.InstanceNorm2d, nn.InstanceNorm3d, *batch_norms)
    has_norms = any(type(layer) in kinds for layer in network.modules())
    fast_precision = resolve_precision("auto", "gpu" if gpu else "cpu")
    options: dict[str, list[Any]] = {
        "precision": list(dict.fromkeys(["32-true", fast_precision])),
        "channels_last": [False, True],
        "fast_norm": [False, True] if has_norms else [False],
        "fast_depthwise": [True],
        "activation_checkpointing": ["none"],
        "compile": [False],
    }
    options |= {key: [value] for key, value in set_by_user.items() if value is not None}
    candidates = []
    for values in product(*options.values()):
        choice = Choice(**dict(zip(options, values, strict=True)))
        # Without channels_last, fast_norm changes nothing
        if choice.channels_last or not choice.fast_norm or set_by_user.get("fast_norm"):
            candidates.append(choice)
    return candidates


def measure(
    work: Work,
    candidates: Sequence[Choice],
    seconds: float = 30.0,
    try_checkpointing: bool = True,
    try_compile: Callable[[float], bool] = lambda step_seconds: False,
    try_batch_size: bool = False,
) -> list[Candidate]:
    """Time the candidates on copies of the network; returns the best first, rejected ones with a remark.

    Args:
        work: what a step works on.
        candidates: plain ones first.
        seconds: time limit, without compiling; the compiled code is cached for the run.
        try_checkpointing: try activation checkpointing if nothing else fits into memory.
        try_compile: takes the fastest step's seconds; whether the run is long enough to try compiling.
        try_batch_size: double the fastest candidate's batch size, again and again, while that lowers the time
            per sample.
    """
    deadline = time.perf_counter() + seconds
    batch_size = len(work.image)
    with torch.random.fork_rng(devices=[work.image.device] if work.image.is_cuda else []):
        expected = _reference(work)
        timed = [Candidate(choice, batch_size) for choice in candidates]
        _race(work, timed, expected, deadline)
        if try_checkpointing:
            timed += _checkpointed(work, timed, expected, deadline + seconds)
        best = _best(timed)
        if best is not None and try_compile(best.per_sample * batch_size):
            timed += _compiled(work, best, expected)
        best = _best(timed)
        if best is not None and try_batch_size:
            timed += _larger(work, best, deadline)
    chosen = _best(timed)
    for candidate in timed:
        candidate.trial = None  # frees its memory
    return sorted(timed, key=lambda candidate: (candidate is not chosen, candidate.per_sample))


def _checkpointed(
    work: Work, timed: Sequence[Candidate], expected: list[float] | None, deadline: float
) -> list[Candidate]:
    """The candidates with activation checkpointing, if none of them fits into memory without."""
    tried: list[Candidate] = []
    for mode in ("pointwise", "blocks"):  # the cheaper one first
        if _best([*timed, *tried]) is not None:
            break
        candidates = [
            Candidate(replace(candidate.choice, activation_checkpointing=mode), candidate.batch_size)
            for candidate in timed
        ]
        _race(work, candidates, expected, deadline)
        tried += candidates
    return tried


def _reference(work: Work) -> list[float] | None:
    """The losses of two steps in plain fp32; None if they do not fit into memory, or the loss is random."""
    try:
        trial = Trial(work, Choice())
        with torch.no_grad():
            first = float(trial.forward())
            second = float(trial.forward())
        if abs(first - second) > 1e-5 * abs(first):
            log.warning(
                "perf=autotune: this network's loss is random, so losses are not compared with plain fp32's"
            )
            return None
        return [float(trial.step()) for _ in range(2)]
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        log.warning("perf=autotune: plain fp32 does not fit into memory, so losses are not compared with it")
        return None


def _race(work: Work, candidates: list[Candidate], expected: list[float] | None, deadline: float) -> None:
    """Time each candidate once, then the faster ones in turns; starts with those likely to be fastest."""
    for candidate in reversed(candidates):
        slowest = max((max(c.seconds) for c in candidates if c.seconds), default=0.0)
        two_steps_fit = time.perf_counter() + 2 * slowest <= deadline
        if slowest and not two_steps_fit and _best(candidates):
            candidate.remark = "not tried: no time left"
        else:
            _begin(work, candidate, expected)
    for _ in range(_ROUNDS - 1):
        best = _best(candidates)
        if best is None:
            return
        for candidate in candidates:
            if candidate.per_sample > _TOO_SLOW * best.per_sample or candidate.trial is None:
                continue
            if time.perf_counter() + candidate.seconds[-1] > deadline:
                return
            _again(candidate)


def _begin(work: Work, candidate: Candidate, expected: list[float] | None) -> None:
    """Build the candidate, take two steps and time the second; a failure becomes its remark."""
    device = work.image.device
    allocated_before = 0  # by the other candidates' weights
    if device.type == "cuda":
        allocated_before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    try:
        trial = Trial(work, candidate.choice)
        losses = [float(trial.step())]
        seconds, loss = _timed(trial)
    except Exception as error:  # plain fp32 has run, so this candidate is the cause
        candidate.remark = _failure(error)
        return
    candidate.seconds.append(seconds)
    if device.type == "cuda":
        candidate.memory_bytes = torch.cuda.max_memory_allocated(device) - allocated_before
        total = torch.cuda.get_device_properties(device).total_memory
        if candidate.memory_bytes > _MEMORY_SHARE * total:
            candidate.remark = "too close to the end of the memory"
    if expected is not None:
        _compare(candidate, [*losses, loss], expected)
    candidate.trial = None if candidate.remark else trial


def _compare(candidate: Candidate, losses: list[float], expected: list[float]) -> None:
    tolerance = _TOLERANCE.get(candidate.choice.precision, max(_TOLERANCE.values()))
    pairs = list(zip(losses, expected, strict=True))
    if all(abs(loss - reference) <= tolerance * max(1e-3, abs(reference)) for loss, reference in pairs):
        return
    losses_text = ", ".join(f"{loss:.5g} for {reference:.5g}" for loss, reference in pairs)
    candidate.remark = f"wrong loss: {losses_text}"
    log.warning(
        "perf=autotune discards %s: its losses differ from plain fp32's (%s)", candidate.choice, losses_text
    )


def _compiled(work: Work, best: Candidate, expected: list[float] | None) -> list[Candidate]:
    """The best candidate so far, compiled; both are timed in turns."""
    if best.choice.compile:
        return []
    candidate = Candidate(replace(best.choice, compile=True), best.batch_size)
    missing = compiler_missing()
    if missing is not None:
        candidate.remark = missing
        return [candidate]
    log.info("perf=autotune: compiling, which a run of this length repays")
    _begin(work, candidate, expected)
    for _ in range(_ROUNDS - 1):
        if candidate.trial is not None and best.trial is not None:
            _again(candidate)
            _again(best)
    return [candidate]


def _larger(work: Work, best: Candidate, deadline: float) -> list[Candidate]:
    """Double the batch size repeatedly, comparing each candidate with the previous one."""
    tried: list[Candidate] = []
    times = 2
    while time.perf_counter() + 8 * best.seconds[-1] < deadline:
        candidate = Candidate(best.choice, len(work.image) * times)
        _begin(work.larger(times), candidate, None)
        for _ in range(2):
            _again(candidate)
        tried.append(candidate)
        if candidate.per_sample > _CHEAPER * best.per_sample:
            candidate.remark = candidate.remark or "a sample is not 5 % cheaper"
            break
        best = candidate
        times *= 2
    return tried


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest; of nearly equal ones the first, which is the plainest."""
    best: Candidate | None = None
    for candidate in candidates:
        seconds_to_beat = math.inf if best is None else _TIE * best.per_sample
        if candidate.per_sample < seconds_to_beat:
            best = candidate
    return best


def _again(candidate: Candidate) -> None:
    """Time one more step; a candidate that fails now is rejected, too."""
    if candidate.trial is None:
        return
    try:
        candidate.seconds.append(_timed(candidate.trial)[0])
    except Exception as error:
        candidate.remark = _failure(error)
        candidate.trial = None


def _failure(error: Exception) -> str:
    if out_of_memory(error):
        return "does not fit into memory"
    return f"fails: {first_line(error)[:100]}"


def _timed(trial: Trial) -> tuple[float, float]:
    """Seconds of a step, and its loss."""
    synchronise: Callable[[], None] = torch.cuda.synchronize if trial.image.is_cuda else (lambda: None)
    synchronise()
    start = time.perf_counter()
    loss = trial.step()
    synchronise()
    return time.perf_counter() - start, float(loss)
