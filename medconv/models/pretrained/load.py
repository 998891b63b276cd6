"""Load pretrained weights from a file: all tensors that fit, with a report of all others."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medconv.config import ConfigError, Derived
from medconv.convs.parametrization import CONVS, TRANSPOSED
from medconv.models.pretrained import adapt, read
from medconv.models.pretrained.adapt import Layers, module_of
from medconv.models.pretrained.match import COUNTER, Match, matched
from medconv.utils.checkpoint_io import output_names
from medconv.utils.logging import shown, some

log = logging.getLogger(__name__)
# the name that replaces `.weight` in a convolution with a computed weight
_COMPUTED = ".parametrizations.weight.original"
_ROWS = 12  # of each kind, in the log
Tensors = Mapping[str, Tensor]
Pairs = Mapping[str, tuple[Tensor, Tensor]]  # by name in the network: the file's tensor, the network's


@dataclass
class Report:
    """Which tensors were loaded and which were not; `str()` is one line, `table()` the first of each kind.

    Args: loaded: names in the network. reshaped: name in the network to what was done. random: name of a
        randomly initialised tensor to the reason. unused: name in the file to the reason. share: share of the
        network's weights, without its head, that came from the file.
    """

    loaded: list[str] = field(default_factory=list)
    reshaped: dict[str, str] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    share: float = 0.0

    def __str__(self) -> str:
        line = f"{len(self.loaded)} of {len(self.loaded) + len(self.random)} tensors loaded"
        if self.reshaped:
            line += f", {len(self.reshaped)} of them reshaped"
        if self.random:
            line += f"; {len(self.random)} randomly initialised ({some(list(self.random), 3)})"
        if self.unused:
            line += f"; {len(self.unused)} of the file not used ({some(list(self.unused), 3)})"
        return line

    def table(self) -> str:
        kinds = {"reshaped": self.reshaped, "random": self.random, "not used": self.unused}
        lines = []
        for kind, rows in {**kinds, "loaded": dict.fromkeys(self.loaded, "")}.items():
            first = list(rows.items())[:_ROWS]
            lines += [f"  {kind:8}  {name}  {words}".rstrip() for name, words in first]
            lines += [f"  {kind:8}  and {len(rows) - _ROWS} more"] * (len(rows) > _ROWS)
        return "\n".join(lines)


def load(
    network: nn.Module,
    path: Path,
    derived: Derived,
    layers: Layers | None = None,
    inflate_2d: str | None = None,
) -> Report:
    """Load the weights of a file that fit into a network, in place, and report all of them.

    Tensors are matched by name (`match`) and loaded if the shapes agree. The input layer is adapted to the
    number of channels, 2D kernels to 3D (`adapt`). A head of another size or of other classes stays random.
    Args:
        derived: of this run.
        layers: the input layers and the head; None: no layer is treated differently.
        inflate_2d: one of `adapt.TO_3D`, or None.
    Raises: ValueError: the file cannot be read, holds numbers that are not finite, or nothing in it fits.
        ConfigError: it has another number of dimensions or another convolution, and no key allows that.
    """
    if inflate_2d not in (None, *adapt.TO_3D):
        allowed = f"null or one of {', '.join(adapt.TO_3D)}"
        raise ConfigError(f"init.inflate_2d must be {allowed}, got {inflate_2d}")
    file_tensors, record = read.read(path)
    tensors = {name: value for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    source, layers = f"init.pretrained={path}", layers or Layers()
    match = matched(file_tensors, tensors)
    kernels = f"it holds {_first_kernels(file_tensors)}; the network has {_first_kernels(tensors)}"
    if match is None:
        raise ValueError(f"{source}: no name in it is one of this network's: {kernels}")
    file_names = {name: match.file_name(name) for name in tensors}
    pairs = {n: (file_tensors[name], tensors[n]) for n, name in file_names.items() if name in file_tensors}
    _need_same_convolution(match, file_tensors, tensors, source)
    _need_same_dimensions(network, pairs, source, inflate_2d)
    saved = _derived_values(record)
    shapes = [(value.shape, own.shape) for value, own in pairs.values() if (value.ndim, own.ndim) == (4, 5)]
    axis = adapt.new_axis(shapes, saved.get("slice_axis"))
    other_classes = bool(saved) and output_names(saved) != output_names(asdict(derived))
    fit = _Fit(network, derived.num_channels, layers, inflate_2d, axis, other_classes)
    report, values = Report(), {}
    for name in tensors:
        value, note = fit(name, *pairs[name]) if name in pairs else (None, "no such name in the file")
        if value is None:
            report.random[name] = note
            continue
        values[name] = value
        report.loaded.append(name)
        if note:
            report.reshaped[name] = note
    _need_some(values, pairs, kernels, network, source)
    if wrong := [str(file_names[name]) for name, value in values.items() if not value.isfinite().all()]:
        raise ValueError(f"{source}: {some(wrong, 3)} in it holds numbers that are not finite")
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    _add_unused(report, file_tensors, file_names, values)
    sizes = {n: value.numel() for n, value in tensors.items() if not adapt.within(n, layers.head)}
    report.share = sum(sizes[name] for name in sizes if name in values) / max(1, sum(sizes.values()))
    _log(report, source, path)
    return report


def _derived_values(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the config in a checkpoint of ours; other files have none."""
    config = record.get("config")
    derived = config.get("derived") if isinstance(config, Mapping) else None
    return derived if isinstance(derived, Mapping) else {}


@dataclass
class _Fit:
    """Makes the tensors of one file fit one network."""

    network: nn.Module
    num_channels: int
    layers: Layers
    how: str | None
    axis: int
    other_classes: bool

    def __call__(self, name: str, value: Tensor, own: Tensor) -> tuple[Tensor | None, str]:
        """What to load and how it was changed, or None and the reason."""
        file_shape, shape = tuple(value.shape), tuple(own.shape)
        changes: list[str] = []
        if self.other_classes and adapt.within(name, self.layers.head):
            return None, "head of other classes"
        layer = _convolution(self.network, name) if (value.ndim, own.ndim) == (4, 5) else None
        if self.how and layer is not None:
            inflated = adapt.inflate_2d(value, layer, self.how, self.axis)
            if inflated is not None:
                value, changes = inflated, [f"2D to 3D by {self.how}, axis {self.axis}"]
        if value.shape != shape and adapt.within(name, self.layers.image):
            adapted = adapt.to_channels(value, shape, self.num_channels)
            if adapted is not None:
                value, changes = adapted, [*changes, "other input channels"]
        if value.shape != shape:
            return None, f"{file_shape} in the file, here {shape}"
        if value.is_floating_point() != own.is_floating_point() or value.is_complex():
            return None, f"{value.dtype} in the file, here {own.dtype}"
        return value, f"{file_shape} to {shape}: {', '.join(changes)}" if changes else ""


def _convolution(network: nn.Module, name: str) -> nn.Module | None:
    """The plain convolution that a tensor of the state dict belongs to; None: another layer."""
    try:
        layer = network.get_submodule(name.rpartition(".")[0])
    except AttributeError:  # a network may name what it saves as it likes
        return None
    return layer if isinstance(layer, CONVS + TRANSPOSED) else None


def _need_same_convolution(match: Match, file_tensors: Tensors, names: Iterable[str], source: str) -> None:
    """Raises: ConfigError: only one of file and network has computed weights."""
    for name in names:
        layer = module_of(name)
        plain, computed = (str(match.file_name(f"{layer}{end}")) for end in (".weight", _COMPUTED))
        if name == layer + _COMPUTED and computed not in file_tensors and plain in file_tensors:
            raise ConfigError(
                f"{source}: it holds plain weights, such as {plain}, and the convolution of this run "
                "computes its own: conv.init_from_weights=true projects them"
            )
        if name == f"{layer}.weight" and plain not in file_tensors and computed in file_tensors:
            raise ConfigError(
                f"{source}: its convolutions compute their weights, from {computed} and others, and here "
                "they are plain: take the `conv` that it was trained with, and conv.init_from_weights=false"
            )


def _need_same_dimensions(network: nn.Module, pairs: Pairs, source: str, how: str | None) -> None:
    """Raises: ConfigError: 2D kernels for 3D without a rule, or 3D ones for 2D."""
    for name, (value, own) in pairs.items():
        if {value.ndim, own.ndim} != {4, 5} or _convolution(network, name) is None:
            continue
        dims = f"it is of a {value.ndim - 2}D network ({name} {tuple(value.shape)})"
        message = f"{source}: {dims}, this one is {own.ndim - 2}D"
        if own.ndim == 4:
            raise ConfigError(f"{message}; 3D weights are not used in 2D")
        if how is None:
            raise ConfigError(
                f"{message}: init.inflate_2d=inflate repeats its kernels along the new axis, "
                "init.inflate_2d=acs puts them into planes"
            )


def _need_some(values: Tensors, pairs: Pairs, kernels: str, network: nn.Module, source: str) -> None:
    """Raises: ValueError: no kernel or matrix of the file fits."""
    names = {name for name, value in network.named_parameters(remove_duplicate=False) if value.ndim > 1}
    if names & values.keys():
        return
    wrong = [f"{n} {tuple(v.shape)}, here {tuple(own.shape)}" for n, (v, own) in pairs.items() if n in names]
    if wrong:
        kernels = f"{len(wrong)} kernels have names of this network's, but other sizes: {some(wrong, 2)}"
        raise ValueError(f"{source}: {kernels}")
    raise ValueError(f"{source}: no kernel in it is one of this network's: {kernels}")


def _first_kernels(tensors: Tensors) -> str:
    """The first kernels and their shapes, for messages."""
    return some([f"{n} {tuple(v.shape)}" for n, v in tensors.items() if v.ndim > 1], 2) or "no kernels"


def _add_unused(
    report: Report, file_tensors: Tensors, file_names: Mapping[str, str | None], values: Tensors
) -> None:
    """Report the tensors of the file that are not loaded."""
    names = {file_name: name for name, file_name in file_names.items()}
    for file_name in file_tensors:
        name = names.get(file_name)
        if name not in values:
            report.unused[file_name] = report.random.get(name, "") if name else "no such name in the network"
    # older files have no counters
    report.random = {name: why for name, why in report.random.items() if not name.endswith(COUNTER)}


def _log(report: Report, source: str, path: Path) -> None:
    """One line for the console, the first rows for the log."""
    line = shown(f"{source}: {report}")
    if report.share < 0.5:
        log.warning("%s; %.0f %% of the weights are the file's, all others random", line, 100 * report.share)
    else:
        log.info("%s", line)
    log.debug("weights from %s\n%s", path, shown(report.table()))
