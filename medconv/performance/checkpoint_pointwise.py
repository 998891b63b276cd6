"""`perf.activation_checkpointing=pointwise`: recompute cheap operations in the backward pass.

The forward pass writes a note of every cheap operation: the function and its arguments. Autograd saves the
note instead of the result; the backward pass follows notes back to tensors that are saved anyway, mostly
outputs of convolutions. It recomputes one tensor at a time and frees it before the next layer needs its own.

Source: Chen et al. 2016, arXiv:1604.06174, who also drop results of cheap layers, but by segments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from medconv.models.layers.instance_norm import norm_by_sample, triton_instance_norm

_WITH_STATISTICS = (F.batch_norm, F.instance_norm)
CHEAP = frozenset(
    (
        *(*_WITH_STATISTICS, F.group_norm, F.layer_norm, norm_by_sample, triton_instance_norm),
        *(F.leaky_relu, F.relu, F.silu, F.gelu, F.elu, F.hardtanh, F.mish, torch.relu, torch.sigmoid),
        *(torch.cat, torch.add, torch.mul),
        *(Tensor.add, Tensor.mul, Tensor.__add__, Tensor.__mul__),
    )
)
_SMALL = 4096  # elements; smaller tensors are saved as they are
_DEEPEST = 50  # notes in a chain: sums of residual blocks form a chain through the whole network


class Recompute(TorchFunctionMode):
    """The context of one forward pass. Args: device_type: whose autocast state is recorded."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._notes: dict[int, Note] = {}  # by storage
        self._own: list[_Saved] = []  # what the operation that runs now has saved
        self._last: tuple[Note, Tensor] | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> Recompute:
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        if self._last is not None:  # the backward pass starts with it: dropping it would save no memory
            self._last[0].value = self._last[1]
        self._last = None
        self._notes.clear()
        self._own.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in CHEAP:
            return function(*args, **kwargs)
        inputs = tree_map(self._note_or_tensor, _pure(function, args, kwargs))
        self._own.clear()
        self._last = None
        result = function(*args, **kwargs)
        large = isinstance(result, Tensor) and result.requires_grad and result.numel() >= _SMALL
        if large and _usable(inputs):
            device = self._device_type
            enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            autocast = {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": False}
            storage = StorageWeakRef(result.untyped_storage())
            self._notes[_storage(result)] = Note(function, inputs, autocast, storage, _identity(result))
            for saved in self._own:  # an activation saves its own result
                if isinstance(saved.content, Tensor):
                    saved.content = self._noted(saved.content)
        return result

    def _note_or_tensor(self, value: Any) -> Any:
        """What a note stores of an argument: the note of a tensor that has one, else the tensor itself."""
        if not isinstance(value, Tensor):
            return value
        return self._note_of(value) or _Held(value.detach(), value._version)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self._noted(tensor))
        self._own.append(saved)
        return saved

    def _noted(self, tensor: Tensor) -> Tensor | Note:
        note = self._note_of(tensor)
        if note is None:
            return tensor
        note.packs += 1
        self._last = note, tensor.detach()
        return note

    def _note_of(self, tensor: Tensor) -> Note | None:
        note = self._notes.get(_storage(tensor))
        return note if note is not None and note.identity == _identity(tensor) else None


@dataclass(eq=False)
class Note:
    """How to recompute a tensor; the result is kept until each operation that saved it has read it.

    Args: autocast: arguments of `torch.autocast`. storage: this reference keeps its address unique.
    """

    function: Callable[..., Tensor]
    inputs: Any
    autocast: dict[str, Any]
    storage: StorageWeakRef
    identity: tuple[Any, ...]
    packs: int = 0
    reads: int = 0
    value: Tensor | None = None

    def __post_init__(self) -> None:
        """`depth`: the length of the chain of notes back to saved tensors."""
        depths = (leaf.depth for leaf in tree_leaves(self.inputs) if isinstance(leaf, Note))
        self.depth: int = 1 + max(depths, default=0)

    def read(self) -> Tensor:
        value = self.computed()
        self.reads += 1
        if self.reads % self.packs == 0:
            self.value = None
        return value

    def computed(self) -> Tensor:
        if self.value is not None:
            return self.value
        args, kwargs = tree_map(_tensor_of, self.inputs)
        with torch.no_grad(), torch.autocast(**self.autocast):
            value = self.function(*args, **kwargs)
        if self.packs:  # it will be read again: a U-Net's skip first by the decoder, then by its own block
            self.value = value
        return value


@dataclass(eq=False)
class _Saved:
    """What autograd keeps in place of a tensor."""

    content: Tensor | Note


@dataclass(eq=False)
class _Held:
    """A tensor that a note needs, and its version when the note was made."""

    tensor: Tensor
    version: int

    @property
    def intact(self) -> bool:
        return self.tensor._version == self.version


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Tells tensors of one storage apart."""
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def _pure(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The same call without side effects: not in place, and no update of running statistics."""
    if kwargs.get("inplace"):
        kwargs = {**kwargs, "inplace": False}
    if function in _WITH_STATISTICS and (kwargs.get("training") or kwargs.get("use_input_stats")):
        kwargs = {**kwargs, "running_mean": None, "running_var": None}
        args = args[:1]
    return args, kwargs


def _usable(inputs: Any) -> bool:
    """Whether the operation overwrote no input and the chain of notes is short."""
    leaves = tree_leaves(inputs)
    intact = all(leaf.intact for leaf in leaves if isinstance(leaf, _Held))
    return intact and all(leaf.depth < _DEEPEST for leaf in leaves if isinstance(leaf, Note))


def _tensor_of(value: Any) -> Any:
    if isinstance(value, Note):
        return value.computed()
    if isinstance(value, _Held):
        if not value.intact:
            changed = "a tensor that perf.activation_checkpointing=pointwise needs was changed in place"
            raise RuntimeError(f"{changed}; use perf.activation_checkpointing=blocks")
        return value.tensor
    return value


def _unpack(saved: _Saved) -> Tensor:
    return saved.content.read() if isinstance(saved.content, Note) else saved.content


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
