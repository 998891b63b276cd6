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

from medconv.models.layers.fast_norm import norm_by_sample
from medconv.models.layers.triton_norm import BatchStatistics, triton_norm

_WITH_STATISTICS = (F.batch_norm, F.instance_norm)
_NORMS = (*_WITH_STATISTICS, F.group_norm, F.layer_norm, norm_by_sample, triton_norm)
_ACTIVATIONS = (F.leaky_relu, F.relu, F.silu, F.gelu, F.elu, F.hardtanh, F.mish, torch.relu, torch.sigmoid)
_SUMS = (torch.cat, torch.add, torch.mul, Tensor.add, Tensor.mul, Tensor.__add__, Tensor.__mul__)
CHEAP = frozenset((*_NORMS, *_ACTIVATIONS, *_SUMS))  # limited by memory bandwidth, not by arithmetic
_SMALL = 4096  # elements; smaller tensors are saved as they are
_DEEPEST = 50  # notes in a chain: sums of residual blocks form a chain through the whole network


class Recompute(TorchFunctionMode):
    """The context of one forward pass.

    Args:
        device_type: whose autocast state is recorded.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._notes: dict[int, Note] = {}  # by storage
        self._saved_now: list[_Saved] = []  # by the operation that runs now
        self._last: tuple[Note, Tensor] | None = None  # saved last, with its value
        self._hooks = ExitStack()

    def __enter__(self) -> Recompute:
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        if self._last is not None:  # the backward pass starts with it: dropping it would save no memory
            note, value = self._last
            note.value = value
        self._last = None
        self._notes.clear()
        self._saved_now.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in CHEAP:
            return function(*args, **kwargs)
        # before the call, which may change them in place
        inputs = tree_map(self._note_or_tensor, _pure(function, args, kwargs))
        self._saved_now.clear()
        self._last = None
        result = function(*args, **kwargs)
        is_saved = isinstance(result, Tensor) and result.requires_grad and result.numel() >= _SMALL
        if is_saved and _usable(inputs):
            self._notes[_storage(result)] = Note(
                function=function,
                inputs=inputs,
                autocast=self._autocast(),
                storage=StorageWeakRef(result.untyped_storage()),
                identity=_identity(result),
            )
            for saved in self._saved_now:  # an activation saves its own result
                if isinstance(saved.content, Tensor):
                    saved.content = self._noted(saved.content)
        return result

    def _autocast(self) -> dict[str, Any]:
        """Arguments of `torch.autocast` for the state of now."""
        return {
            "device_type": self._device_type,
            "dtype": torch.get_autocast_dtype(self._device_type),
            "enabled": torch.is_autocast_enabled(self._device_type),
            "cache_enabled": False,
        }

    def _note_or_tensor(self, value: Any) -> Any:
        """What a note stores of an argument: the note of a tensor that has one, else the tensor itself."""
        if not isinstance(value, Tensor):
            return value
        return self._note_of(value) or _Held(value.detach(), value._version)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self._noted(tensor))
        self._saved_now.append(saved)
        return saved

    def _noted(self, tensor: Tensor) -> Tensor | Note:
        """The note of a tensor, if it has one, to save in its place."""
        note = self._note_of(tensor)
        if note is None:
            return tensor
        note.packs += 1
        self._last = (note, tensor.detach())
        return note

    def _note_of(self, tensor: Tensor) -> Note | None:
        note = self._notes.get(_storage(tensor))
        if note is None or note.identity != _identity(tensor):
            return None
        return note


@dataclass(eq=False)
class Note:
    """How to recompute a tensor; the result is kept until each operation that saved it has read it.

    Args:
        function: with `inputs` it gives the tensor.
        inputs: arguments and keyword arguments, with notes and `_Held` in place of tensors.
        autocast: arguments of `torch.autocast`.
        storage: of the tensor; this reference keeps its address unique.
        identity: of the tensor among those of one storage.
        packs: how many operations have saved the tensor.
        reads: how often the backward pass has read it.
        value: the tensor, while it is needed again.
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
        notes = [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Note)]
        self.depth: int = 1 + max((note.depth for note in notes), default=0)

    def read(self) -> Tensor:
        """The tensor, for one of the operations that saved it."""
        value = self.computed()
        self.reads += 1
        if self.reads % self.packs == 0:  # all have read it; again, where the graph is retained
            self.value = None
        return value

    def computed(self) -> Tensor:
        """The tensor, computed anew unless it is kept."""
        if self.value is not None:
            return self.value
        # Recursively: the inputs may be notes themselves, down to tensors that autograd keeps anyway.
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
    uses_batch = kwargs.get("training") or kwargs.get("use_input_stats")
    if function in _WITH_STATISTICS and uses_batch:
        args = args[:1]  # the running statistics come as positional arguments, after the input
        kwargs = {**kwargs, "running_mean": None, "running_var": None}
    batch = kwargs.get("batch")
    if isinstance(batch, BatchStatistics):  # of `triton_norm`
        kwargs = {**kwargs, "batch": batch.without_update()}
    return args, kwargs


def _usable(inputs: Any) -> bool:
    """Whether the operation overwrote no input and the chain of notes is short."""
    leaves = tree_leaves(inputs)
    is_intact = all(leaf.intact for leaf in leaves if isinstance(leaf, _Held))
    is_short = all(leaf.depth < _DEEPEST for leaf in leaves if isinstance(leaf, Note))
    return is_intact and is_short


def _tensor_of(value: Any) -> Any:
    if isinstance(value, Note):
        return value.computed()
    if isinstance(value, _Held):
        if not value.intact:
            raise RuntimeError(
                "a tensor that activation_checkpointing=pointwise needs was changed in place; "
                "use activation_checkpointing=blocks"
            )
        return value.tensor
    return value


def _unpack(saved: _Saved) -> Tensor:
    return saved.content.read() if isinstance(saved.content, Note) else saved.content


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
