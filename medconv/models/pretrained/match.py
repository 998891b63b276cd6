"""Match tensor names of a file with those of a network, from all names together, without known prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

COUNTER = "num_batches_tracked"  # of batch norms; says nothing of a network


@dataclass(frozen=True)
class Match:
    """Maps a network's names to a file's names: another prefix, the same rest.

    Args: before: the prefix in the file, such as `state_dict.module.`. own: the prefix in the network, such
        as `encoder.` for a file of an encoder. Both may be empty.
    """

    before: str
    own: str

    def name(self, own: str) -> str | None:
        """The name in the file, which may not have it; None: outside of the part that the file covers."""
        return self.before + own.removeprefix(self.own) if own.startswith(self.own) else None


def matched(theirs: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Match | None:
    """The prefixes for which most tensors have a tensor of the same name and number of outputs in the file.

    This finds `module.` of DataParallel, `network.` of Lightning, `state_dict`, `model` or any other wrapper,
    and an encoder within a larger network. Of two equally good ones, the first in the file is used.
    Returns: None: no name matches.
    """
    ends: dict[str, list[str]] = {}  # of names in the file, at any dot, to what stands before
    for name in theirs:
        parts = name.split(".")
        for cut in range(len(parts)):
            ends.setdefault(".".join(parts[cut:]), []).append("".join(f"{part}." for part in parts[:cut]))
    votes: Counter[Match] = Counter()
    for prefix in _wrappers(own):
        for name, value in own.items():
            if name.startswith(prefix) and not name.endswith(COUNTER):
                end = name.removeprefix(prefix)
                for before in ends.get(end, ()):
                    votes[Match(before, prefix)] += theirs[before + end].shape[:1] == value.shape[:1]
    best = max(votes, key=lambda match: votes[match], default=None)
    return best if best is not None and votes[best] else None


def _wrappers(own: Mapping[str, Tensor]) -> Iterator[str]:
    """Prefixes that at least half of a network's names share: shorter parts would match by chance."""
    counts: Counter[str] = Counter()
    for name in own:
        parts = name.split(".")
        counts.update("".join(f"{part}." for part in parts[:cut]) for cut in range(len(parts)))
    yield from (prefix for prefix, count in counts.items() if 2 * count >= len(own))
