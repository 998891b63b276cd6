"""Timings of variants in turn, so that disturbances of the machine affect all of them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch


def alternate(
    variants: Mapping[str, Callable[[], Any]],
    reference: str,
    pairs: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    calls: int = 1,
) -> dict[str, dict[str, float]]:
    """Time variants in turn, in an order drawn anew each round.

    Args:
        variants: name to what is timed.
        reference: name of the variant that the others are compared with.
        pairs: rounds in which every variant is timed once.
        warm_up: calls of each variant before.
        clock: tells seconds.
        calls: of a variant between two waits for a GPU. With a wait around every call, a small kernel's time
            is that of Python and the launch.
    Returns:
        Per variant `seconds` (median), `ratio` to the reference (median over rounds), and `spread` of that
        ratio (from the first to the third quartile).
    """
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        for _ in range(warm_up):
            run()
    order = list(variants)
    dice = random.Random(0)
    for _ in range(pairs):
        dice.shuffle(order)  # the variant before changes the caches
        for name in order:
            run = variants[name]
            synchronise()
            start = clock()
            for _ in range(calls):
                run()
            synchronise()
            seconds[name].append((clock() - start) / calls)
    return {name: compared(times, seconds[reference]) for name, times in seconds.items()}


def computing_clock() -> Callable[[], float]:
    """A clock for work that only computes, to which other work on the machine matters little if it can.

    One thread: the time of the process, which is that of the wall on an idle core. More threads, or a GPU:
    the time of the wall.
    """
    is_one_thread = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time if is_one_thread else time.perf_counter


def compared(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """`seconds`, `ratio` and `spread`, as of `alternate`, from times of two variants in the same rounds."""
    ratios = sorted(a / b for a, b in zip(seconds, reference, strict=True))
    spread = ratios[(3 * len(ratios)) // 4] - ratios[len(ratios) // 4]
    return {"seconds": median(seconds), "ratio": median(ratios), "spread": spread}
