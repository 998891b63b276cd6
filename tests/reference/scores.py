"""Numbers of answers for whole images, one case and one pair after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence


def auc(scores: Sequence[float], positive: Sequence[bool]) -> float | None:
    """The share of pairs that are in order; ties count one half."""
    pairs = [
        (a, b)
        for a, p in zip(scores, positive, strict=True)
        if p
        for b, q in zip(scores, positive, strict=True)
        if not q
    ]
    return _mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])


def calibration_error(probabilities: Sequence[float], right: Sequence[bool], bins: int = 15) -> float | None:
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [i for i, p in enumerate(probabilities) if low <= p < high or (b == bins - 1 and p == 1)]
        if inside:
            confidence = _mean([probabilities[i] for i in inside])
            share = _mean([float(right[i]) for i in inside])
            total += len(inside) / len(probabilities) * abs(confidence - share)
    return total if len(probabilities) else None


def classes(outputs: Sequence[Sequence[float]], truth: Sequence[int]) -> dict[str, float | None]:
    count = len(outputs[0])
    called = [list(row).index(max(row)) for row in outputs]
    aucs, recalls, f1s = [], [], []
    for c in range(count):
        aucs.append(auc([row[c] for row in outputs], [t == c for t in truth]))
        recalls.append(_mean([float(p == c) for p, t in zip(called, truth, strict=True) if t == c]))
        f1s.append(_f1([p == c for p in called], [t == c for t in truth]))
    right = [p == t for p, t in zip(called, truth, strict=True)]
    return {
        "auc": aucs[1] if count == 2 else _mean_known(aucs),
        "accuracy": _mean([float(r) for r in right]),
        "balanced_accuracy": _mean_known(recalls),
        "f1": _mean_known(f1s),
        "calibration_error": calibration_error([max(row) for row in outputs], right),
    }


def findings(outputs: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> dict[str, float | None]:
    rows = [_finding([o[i] for o in outputs], [t[i] == 1 for t in truth]) for i in range(len(outputs[0]))]
    return {name: _mean_known([row[name] for row in rows]) for name in rows[0]}


def numbers(outputs: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> dict[str, float | None]:
    rows = [_number([o[i] for o in outputs], [t[i] for t in truth]) for i in range(len(outputs[0]))]
    return {name: _mean_known([row[name] for row in rows]) for name in rows[0]}


def _finding(scores: list[float], positive: list[bool]) -> dict[str, float | None]:
    predicted = [s > 0.5 for s in scores]
    right = [float(f == t) for f, t in zip(predicted, positive, strict=True)]
    recalls = [
        _mean([r for r, t in zip(right, positive, strict=True) if t is kind]) for kind in (True, False)
    ]
    return {
        "auc": auc(scores, positive),
        "accuracy": _mean(right),
        "balanced_accuracy": _mean_known(recalls),
        "f1": _f1(predicted, positive),
        "calibration_error": calibration_error(scores, positive),
    }


def _number(outputs: list[float], truth: list[float]) -> dict[str, float | None]:
    off = [o - t for o, t in zip(outputs, truth, strict=True)]
    mean_o, mean_t = sum(outputs) / len(outputs), sum(truth) / len(truth)
    both = sum((o - mean_o) * (t - mean_t) for o, t in zip(outputs, truth, strict=True))
    of_o, of_t = sum((o - mean_o) ** 2 for o in outputs), sum((t - mean_t) ** 2 for t in truth)
    squares = sum(d * d for d in off)
    return {
        "mae": _mean([abs(d) for d in off]),
        "rmse": math.sqrt(squares / len(off)),
        "r2": 1 - squares / of_t if of_t else None,
        "pearson": both / math.sqrt(of_o * of_t) if of_o and of_t else None,
    }


def _f1(predicted: Sequence[bool], positive: Sequence[bool]) -> float | None:
    both = sum(f and t for f, t in zip(predicted, positive, strict=True))
    return 2 * both / (sum(predicted) + sum(positive)) if sum(predicted) + sum(positive) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_known(values: Sequence[float | None]) -> float | None:
    return _mean([value for value in values if value is not None])
