"""What came of loading pretrained weights: which tensors were loaded, and why others were not."""

from dataclasses import dataclass, field

from medconv.utils.logging import some

_ROWS = 12  # of each kind, in the log


@dataclass
class Report:
    """Which tensors were loaded and which were not; `str()` is one line, `table()` the first of each kind.

    Args:
        loaded: names in the network.
        reshaped: name in the network to what was done.
        random: name of a randomly initialised tensor to the reason.
        unused: name in the file to the reason.
        rescaled: name of a convolution to the factor of its kernel (`rescale`).
        share: of the network's weights, without its head, that came from the file.
    """

    loaded: list[str] = field(default_factory=list)
    reshaped: dict[str, str] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    rescaled: dict[str, str] = field(default_factory=dict)
    share: float = 0.0

    def __str__(self) -> str:
        line = f"{len(self.loaded)} of {len(self.loaded) + len(self.random)} tensors loaded"
        if self.reshaped:
            line += f", {len(self.reshaped)} of them reshaped"
        if self.rescaled:
            line += f", {len(self.rescaled)} kernels rescaled"
        if self.random:
            line += f"; {len(self.random)} randomly initialised ({some(list(self.random), 3)})"
        if self.unused:
            line += f"; {len(self.unused)} of the file not used ({some(list(self.unused), 3)})"
        return line

    def table(self) -> str:
        """One line per tensor, with what was done to it or why not."""
        kinds = {
            "reshaped": self.reshaped,
            "rescaled": self.rescaled,
            "random": self.random,
            "not used": self.unused,
            "loaded": dict.fromkeys(self.loaded, ""),
        }
        lines = []
        for kind, notes in kinds.items():
            for name, note in list(notes.items())[:_ROWS]:
                lines.append(f"  {kind:8}  {name}  {note}".rstrip())
            if len(notes) > _ROWS:
                lines.append(f"  {kind:8}  and {len(notes) - _ROWS} more")
        return "\n".join(lines)
