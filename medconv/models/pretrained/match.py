"""Match tensor names of a file with those of a network, from all names together, without known prefixes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

COUNTER = "num_batches_tracked"  # of batch norms; says nothing of a network


@dataclass(frozen=True)
class Match:
    """Maps a network's names to a file's names: another prefix, the same rest.

    Args: file_prefix: such as `state_dict.module.`. network_prefix: such as `encoder.` for a file of an
        encoder. Both may be empty.
    """

    file_prefix: str
    network_prefix: str

    def file_name(self, name: str) -> str | None:
        """The name in the file, which may not have it; None: outside of the part that the file covers."""
        if not name.startswith(self.network_prefix):
            return None
        return self.file_prefix + name.removeprefix(self.network_prefix)


def matched(file_tensors: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Match | None:
    """The prefixes for which most tensors have a tensor of the same name and number of outputs in the file.

    This finds `module.` of DataParallel, `network.` of Lightning, `state_dict`, `model` or any other wrapper,
    and an encoder within a larger network. Of two equally good ones, the first in the file is used.
    Args: tensors: of the network. Returns: None: no name matches.
    """
    prefixes: dict[str, list[str]] = {}  # of names in the file, by the rest of the name after any dot
    for name in file_tensors:
        for prefix in _prefixes(name):
            prefixes.setdefault(name.removeprefix(prefix), []).append(prefix)
    votes: Counter[Match] = Counter()
    for wrapper in _wrappers(tensors):
        for name, value in tensors.items():
            if name.startswith(wrapper) and not name.endswith(COUNTER):
                rest = name.removeprefix(wrapper)
                for prefix in prefixes.get(rest, ()):
                    same_outputs = file_tensors[prefix + rest].shape[:1] == value.shape[:1]
                    votes[Match(prefix, wrapper)] += same_outputs
    best = max(votes, key=lambda match: votes[match], default=None)
    return best if best is not None and votes[best] else None


def _wrappers(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Prefixes that at least half of a network's names share: shorter parts would match by chance."""
    counts = Counter(prefix for name in tensors for prefix in _prefixes(name))
    yield from (prefix for prefix, count in counts.items() if 2 * count >= len(tensors))


def _prefixes(name: str) -> list[str]:
    """What stands before each part of a dotted name: `a.b.c` has ``, `a.` and `a.b.`."""
    parts = name.split(".")
    return ["".join(f"{part}." for part in parts[:cut]) for cut in range(len(parts))]
