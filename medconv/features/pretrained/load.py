"""Load pretrained weights from a file: all tensors that fit, with a report of all others."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medconv.config import ConfigError, Derived, Node
from medconv.features.pretrained import read
from medconv.features.pretrained.fit import (
    TO_3D,
    Fit,
    Layers,
    Pair,
    Pairs,
    convolution_of,
    module_of,
    new_axis,
    within,
)
from medconv.features.pretrained.match import COUNTER, Match, matched
from medconv.features.pretrained.nnunet_names import by_our_names, has_nnunet_names, with_our_axes
from medconv.features.pretrained.rescale import kernel_sizes, rescale
from medconv.utils.checkpoint_io import channel_order, output_names
from medconv.utils.logging import shown, some

log = logging.getLogger(__name__)
_COMPUTED = ".parametrizations.weight.original"
# convolutions with several layers in the place of one
_CHAINS = ("medconv.convs.separable", "medconv.convs.bottleneck", "medconv.convs.se")
# keys of `conv` that say where its layers are and on which grid, not what their weights mean
_PLACES = ("where", "share", "spacing_mm", "reference_mm", "init_from_weights")
_ROWS = 12  # of each kind of tensors in the report of the log
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Origin:
    """What is known of a network from elsewhere, beside its file.

    Args:
        axes: the spatial axis of its kernels that becomes each of ours.
        output_names: of its classes or regions, without the background.
    """

    axes: tuple[int, ...]
    output_names: tuple[str, ...]


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


def load(
    network: nn.Module,
    path: Path,
    derived: Derived,
    layers: Layers | None = None,
    inflate_2d: str | None = None,
    origin: Origin | None = None,
    conv: Node | None = None,
) -> Report:
    """Load the weights of a file that fit into a network, in place, and report all of them.

    Tensors are matched by name (`match`) and loaded if the shapes agree. The input layer is adapted to the
    number of channels, 2D kernels to 3D (`fit`). A head of another size or of other classes stays random.

    Args:
        network: whose tensors are overwritten.
        path: a checkpoint of ours or of others, or a safetensors file.
        derived: of this run.
        layers: the input layers and the head; None: no layer is treated differently.
        inflate_2d: one of `TO_3D`, or None.
        origin: of a network that is not ours; None: only the file is known.
        conv: of this run; None: not known.
    Raises:
        ValueError: the file cannot be read, holds numbers that are not finite, or nothing in it fits.
        ConfigError: it has another number of dimensions or another convolution, and no key allows that.
    """
    if inflate_2d not in (None, *TO_3D):
        allowed = ", ".join(TO_3D)
        raise ConfigError(f"init.inflate_2d must be null or one of {allowed}, got {inflate_2d}")
    file_tensors, metadata = read.read(path)
    saved = read.config_group(metadata, "derived") or {}
    layers = layers or Layers()
    source = f"init.pretrained={path}"
    tensors = {name: value for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    axes = origin.axes if origin else None
    if not has_nnunet_names(tensors):
        file_tensors = by_our_names(file_tensors, axes)
    elif not metadata and has_nnunet_names(file_tensors):  # nnU-Net's own network, trained here
        file_tensors = with_our_axes(file_tensors, axes)
    kernels = f"it holds {_first_kernels(file_tensors)}; the network has {_first_kernels(tensors)}"
    match = matched(file_tensors, tensors)
    if match is None:
        raise ValueError(f"{source}: no name in it is one of this network's: {kernels}")
    file_names = {name: match.file_name(name) for name in tensors}
    pairs = _pairs(file_names, file_tensors, tensors)
    # Before anything is loaded: a network with half of its weights would be worse than an error.
    saved_conv = read.config_group(metadata, "conv") or {}
    swapped = {module_of(name) for name in tensors if _COMPUTED in name}
    swapped |= {module_of(name) for name in layers.kernels if name not in tensors}
    _check_same_convolution(match, file_tensors, tensors, swapped, saved_conv, source)
    if any(name.startswith(f"{match.file_name(layer)}.") for layer in swapped for name in file_tensors):
        _check_same_settings(saved_conv, conv or {}, source)
    _check_dimensions(network, pairs, source, inflate_2d)
    fit = Fit(
        network=network,
        num_channels=derived.num_channels,
        layers=layers,
        inflate_2d=inflate_2d,
        axis=_new_axis(pairs, saved),
        has_other_classes=_has_other_classes(saved, origin, derived),
        channel_order=channel_order(metadata, derived.modalities),
    )
    report = Report()
    values = _fitted(fit, pairs, tensors, report)
    _check_any_kernel(values, pairs, kernels, network, source)
    _check_finite(values, file_names, source)
    random_sizes = kernel_sizes(network)
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    factors = rescale(network, random_sizes)
    report.rescaled = {name: f"times {factor:g}" for name, factor in factors.items()}
    _add_unused(report, file_tensors, file_names, values)
    report.share = _loaded_share(report.loaded, tensors, layers)
    _log(report, source, path)
    return report


def _has_other_classes(saved: Mapping[str, Any], origin: Origin | None, derived: Derived) -> bool:
    """Whether the file's network predicts something else; False also where that is not known."""
    if origin is not None:
        return list(origin.output_names) != output_names(asdict(derived))
    return bool(saved) and output_names(saved) != output_names(asdict(derived))


def _pairs(file_names: Mapping[str, str | None], file_tensors: Tensors, tensors: Tensors) -> Pairs:
    pairs = {}
    for name, file_name in file_names.items():
        if file_name is not None and file_name in file_tensors:
            pairs[name] = Pair(file=file_tensors[file_name], network=tensors[name])
    return pairs


def _new_axis(pairs: Pairs, saved: Mapping[str, Any]) -> int:
    """The axis that the file's 2D kernels lack."""
    inflated = [pair for pair in pairs.values() if pair.is_2d_to_3d]
    shapes = [(pair.file.shape, pair.network.shape) for pair in inflated]
    return new_axis(shapes, saved.get("slice_axis"))


def _fitted(fit: Fit, pairs: Pairs, tensors: Tensors, report: Report) -> dict[str, Tensor]:
    """What to load, by name in the network; reports each of the network's tensors."""
    values = {}
    for name in tensors:
        if name not in pairs:
            report.random[name] = "no such name in the file"
            continue
        value, note = fit(name, pairs[name])
        if value is None:
            report.random[name] = note
            continue
        values[name] = value
        report.loaded.append(name)
        if note:
            report.reshaped[name] = note
    # A file may hold what two layers share under the name of one of them, as safetensors do.
    storages = {tensors[name].data_ptr() for name in values}
    for name, value in tensors.items():
        if name not in pairs and value.numel() and value.data_ptr() in storages:
            del report.random[name]
            report.loaded.append(name)
    return values


def _loaded_share(loaded: Sequence[str], tensors: Tensors, layers: Layers) -> float:
    """The share that is loaded of the network's numbers outside of its head."""
    total = 0
    number_loaded = 0
    names = set(loaded)
    for name, value in tensors.items():
        if not within(name, layers.head):
            total += value.numel()
            number_loaded += value.numel() if name in names else 0
    return number_loaded / max(1, total)


def _check_same_convolution(
    match: Match,
    file_tensors: Tensors,
    tensors: Tensors,
    swapped: Collection[str],
    saved_conv: Mapping[str, Any],
    source: str,
) -> None:
    """Check that file and network agree which kernels are plain weights.

    Others are computed, or are those of several layers in the place of one.

    Args:
        swapped: layers of the network whose kernel is not plain.
        saved_conv: `conv` of the run that the file is from; empty: not known.
    Raises:
        ConfigError: a plain kernel of one of them has other weights in its place in the other.
    """
    plain_names = {match.file_name(f"{layer}.weight"): layer for layer in swapped}
    for plain in file_tensors:
        if plain in plain_names:
            raise ConfigError(
                f"{source}: it holds plain weights, such as {plain}, and the convolution of this run has "
                f"others in the place of {plain_names[plain]}: conv.init_from_weights=true projects them"
            )
    of_file = {module_of(name): name for name in file_tensors if _COMPUTED in name}
    if saved_conv.get("_target_") in _CHAINS:
        of_file |= {
            name.rsplit(".", 2)[0]: name for name in file_tensors if re.search(r"\.\d\.weight$", name)
        }
    for name in tensors:
        layer = str(match.file_name(module_of(name)))
        if name == f"{module_of(name)}.weight" and layer in of_file and f"{layer}.weight" not in file_tensors:
            raise ConfigError(
                f"{source}: its convolutions have other weights, such as {of_file[layer]}, and here they are "
                "plain: take the `conv` that it was trained with, and conv.init_from_weights=false"
            )


def _check_same_settings(saved_conv: Mapping[str, Any], conv: Mapping[str, Any], source: str) -> None:
    """Check that the weights that kernels are computed from mean the same in the file and here.

    Their sizes do not say so: those of reflections along one axis fit those along another one.

    Raises:
        ConfigError: another convolution, or another value of one of its keys.
    """
    for key in saved_conv:
        if key in _PLACES or key not in conv:
            continue
        saved, own = saved_conv[key], conv[key]
        if key == "_target_":  # a function may be imported from several modules
            saved, own = str(saved).rpartition(".")[2], str(own).rpartition(".")[2]
        if saved != own:
            raise ConfigError(
                f"{source}: it was trained with conv.{key}={saved_conv[key]}, here it is {conv[key]}, so "
                "that its weights would make other kernels: take the `conv` that it was trained with"
            )


def _check_dimensions(network: nn.Module, pairs: Pairs, source: str, inflate_2d: str | None) -> None:
    """Check that the kernels have as many axes, or that there is a rule to inflate them.

    Raises:
        ConfigError: 2D kernels for 3D without a rule, or 3D ones for 2D.
    """
    for name, pair in pairs.items():
        differs = {pair.file.ndim, pair.network.ndim} == {4, 5}
        if not differs or convolution_of(network, name) is None:
            continue
        message = (
            f"{source}: it is of a {pair.file.ndim - 2}D network ({name} {tuple(pair.file.shape)}), "
            f"this one is {pair.network.ndim - 2}D"
        )
        if not pair.is_2d_to_3d:
            raise ConfigError(f"{message}; 3D weights are not used in 2D")
        if inflate_2d is None:
            raise ConfigError(
                f"{message}: init.inflate_2d=inflate repeats its kernels along the new axis, "
                "init.inflate_2d=acs puts them into planes"
            )


def _check_any_kernel(values: Tensors, pairs: Pairs, kernels: str, network: nn.Module, source: str) -> None:
    """Check that something was learned before: norms and biases alone are not worth a start.

    Args:
        kernels: the first ones of file and network, for the message.
    Raises:
        ValueError: no kernel or matrix of the file fits.
    """
    parameters = network.named_parameters(remove_duplicate=False)
    kernel_names = {name for name, parameter in parameters if parameter.ndim > 1}
    if kernel_names & values.keys():
        return
    other_sizes = [
        f"{name} {tuple(pair.file.shape)}, here {tuple(pair.network.shape)}"
        for name, pair in pairs.items()
        if name in kernel_names
    ]
    if other_sizes:
        raise ValueError(
            f"{source}: {len(other_sizes)} kernels have names of this network's, but other sizes: "
            f"{some(other_sizes, 2)}"
        )
    raise ValueError(f"{source}: no kernel in it is one of this network's: {kernels}")


def _check_finite(values: Tensors, file_names: Mapping[str, str | None], source: str) -> None:
    """Check the numbers that would be loaded.

    Raises:
        ValueError: names the tensors with NaN or infinity.
    """
    broken_names = [name for name, value in values.items() if not value.isfinite().all()]
    broken = [str(file_names[name]) for name in broken_names]
    if broken:
        raise ValueError(f"{source}: {some(broken, 3)} in it holds numbers that are not finite")


def _first_kernels(tensors: Tensors) -> str:
    """The first kernels and their shapes, for messages."""
    kernels = [f"{name} {tuple(value.shape)}" for name, value in tensors.items() if value.ndim > 1]
    return some(kernels, 2) or "no kernels"


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
