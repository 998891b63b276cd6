"""Match tensor names of a file with those of a network, from all names together, without known prefixes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

COUNTER = "num_batches_tracked"  # of batch norms; says nothing of a network


@dataclass(frozen=True)
class Match:
    """Maps a network's names to a file's names: another prefix, the same suffix.

    Args:
        file_prefix: such as `state_dict.module.`; may be empty.
        network_prefix: such as `encoder.` for a file of an encoder; may be empty.
    """

    file_prefix: str
    network_prefix: str

    def file_name(self, name: str) -> str | None:
        """The name in the file, which may not have it; None: outside of what the file covers."""
        if not name.startswith(self.network_prefix):
            return None
        return self.file_prefix + name.removeprefix(self.network_prefix)


def matched(file_tensors: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Match | None:
    """The prefixes for which most tensors have a tensor of the same name and number of outputs in the file.

    This finds `module.` of DataParallel, `network.` of Lightning, `state_dict`, `model` or any other wrapper,
    and an encoder within a larger network. Of two equally good ones, the first in the file is used.

    Args:
        file_tensors: by name in the file.
        tensors: by name in the network.
    Returns:
        The prefixes; None: no name matches.
    """
    file_prefixes = _prefixes_by_suffix(file_tensors)
    # Every tensor votes for each pair of prefixes under which the file has one like it.
    votes: Counter[Match] = Counter()
    for network_prefix in _common_prefixes(tensors):
        for name, value in tensors.items():
            if not name.startswith(network_prefix) or name.endswith(COUNTER):
                continue
            suffix = name.removeprefix(network_prefix)
            for file_prefix in file_prefixes.get(suffix, ()):
                file_value = file_tensors[file_prefix + suffix]
                same_outputs = file_value.shape[:1] == value.shape[:1]
                # a match without votes counts too: it keeps the order of the file
                votes[Match(file_prefix, network_prefix)] += same_outputs
    best = max(votes, key=lambda match: votes[match], default=None)
    return best if best is not None and votes[best] else None


def _prefixes_by_suffix(names: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """What may stand before a name: `a.b.c` gives ``, `a.` and `a.b.` by `a.b.c`, `b.c` and `c`."""
    prefixes: dict[str, list[str]] = {}
    for name in names:
        for prefix in _prefixes(name):
            prefixes.setdefault(name.removeprefix(prefix), []).append(prefix)
    return prefixes


def _common_prefixes(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Prefixes that at least half of a network's names share: rarer ones would match by chance."""
    counts = Counter(prefix for name in tensors for prefix in _prefixes(name))
    for prefix, count in counts.items():
        if 2 * count >= len(tensors):
            yield prefix


def _prefixes(name: str) -> list[str]:
    """What stands before each word of a dotted name: `a.b.c` has ``, `a.` and `a.b.`."""
    prefixes = [""]
    for word in name.split(".")[:-1]:
        prefixes.append(f"{prefixes[-1]}{word}.")
    return prefixes
