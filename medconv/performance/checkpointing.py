"""Activation checkpointing: less memory, because the backward pass recomputes what the forward pass drops.

`blocks` keeps the input of each block and recomputes the whole block. `pointwise` keeps the outputs of
convolutions and recomputes only cheap operations: norms, activations, concatenations and sums. Both give the
gradients of the plain network, bit for bit where the library's kernels are deterministic. `compute_in_parts`
recomputes the whole network for one part of a batch after another.

For `pointwise`, the forward pass writes a note of every cheap operation: the function and its arguments.
Autograd saves the note instead of the result; the backward pass follows notes back to tensors that are saved
anyway, mostly outputs of convolutions. It recomputes one tensor at a time and frees it before the next layer
needs its own.

Source: Chen et al. 2016, arXiv:1604.06174; unlike there, `blocks` has one segment per block of convolutions,
and `pointwise` none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from medconv.models.layers.fast_norm import norm_by_sample
from medconv.models.layers.triton_norm import BatchStatistics, triton_norm
from medconv.models.mixin import Mixin, mixed

CHECKPOINTING = ("none", "blocks", "pointwise")


def apply_checkpointing(network: nn.Module, mode: str) -> int:
    """Set the mode of a network, one of `CHECKPOINTING`, in place; returns how many of its modules are
    checkpointed.
    """
    if mode == "none":
        return 0
    mixin: Any
    if mode == "pointwise":
        candidates = [network]
        mixin = _Pointwise
    else:
        candidates = _blocks(network)
        mixin = _Checkpointed
    modules = [module for module in candidates if not isinstance(module, (_Pointwise, _Checkpointed))]
    for module in modules:
        module.__class__ = mixed(mixin, module)
    return len(modules)


def compute_in_parts(network: nn.Module, samples_at_once: int) -> None:
    """Let a network take training batches of any size, in place, with the memory of `samples_at_once`.

    The loss of the outputs and its gradients are those of the whole batch, up to the order of sums; batch
    norms see one part after another.
    """
    network.__class__ = mixed(_InParts, network)
    network.samples_at_once = samples_at_once  # type: ignore[assignment]


class _Pointwise(Mixin):
    """Recomputes cheap operations of the whole network."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_training_step = self.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not is_training_step:
            return super().forward(*args, **kwargs)  # the compiler itself chooses what to keep
        arguments = (*args, *kwargs.values())
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        with Recompute(device):
            return super().forward(*args, **kwargs)


class _Checkpointed(Mixin):
    """Recomputes a block from its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return self._recomputed(super().forward, *args, **kwargs)

    def _recomputed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of the module's `forward`, which the backward pass computes again."""
        if torch.compiler.is_compiling():  # it supports no contexts, and updates statistics only once
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,  # reentrant checkpointing would mark DDP's parameters ready twice
            context_fn=self._contexts,
            **kwargs,
        )

    def _contexts(self) -> tuple[Any, Any]:
        """Around the forward pass, and around its recomputation."""
        return nullcontext(), _FrozenStatistics(self)


class _InParts(_Checkpointed):
    """Computes a training batch in parts, of which all but the last are recomputed from the images."""

    samples_at_once: int

    def forward(self, image: Tensor, **kwargs: Any) -> Any:
        forward = super(_Checkpointed, self).forward
        if not (self.training and torch.is_grad_enabled()):
            return forward(image, **kwargs)
        *earlier, last = image.split(self.samples_at_once)
        outputs = [self._recomputed(forward, part, **kwargs) for part in earlier]
        outputs.append(forward(last, **kwargs))
        return tree_map(lambda *parts: torch.cat(parts), *outputs)


class _FrozenStatistics:
    """Keeps the recomputation from adding a batch to the running statistics a second time.

    Entered once per backward pass, so more than once where the graph is retained.
    """

    def __init__(self, block: nn.Module) -> None:
        norms = (module for module in block.modules() if isinstance(module, _NormBase))
        self._norms = [norm for norm in norms if norm.track_running_stats]

    def __enter__(self) -> None:
        self._saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        self._statistics = []
        for norm, momentum, count in self._saved:
            norm.num_batches_tracked = None if count is None else count.clone()
            if momentum is not None:
                norm.momentum = 0.0
            else:  # a mean of all batches, for which fast norms have no kernel: 0 would give it one
                statistics = (norm.running_mean, norm.running_var)
                self._statistics += [(value, value.clone()) for value in statistics if value is not None]

    def __exit__(self, *error: object) -> None:
        for norm, momentum, count in self._saved:
            norm.momentum = momentum
            norm.num_batches_tracked = count
        for value, before in self._statistics:
            value.copy_(before)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The smallest modules with two or more convolutions, each once: DynUNet registers them twice."""
    blocks: list[nn.Module] = []
    _collect_blocks(network, blocks)
    return list(dict.fromkeys(blocks))


def _collect_blocks(module: nn.Module, blocks: list[nn.Module]) -> int:
    """Number of spatial convolutions inside; the smallest modules that hold two are appended to `blocks`."""
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        is_spatial = any(size > 1 for size in module.kernel_size)
        return int(is_spatial)
    blocks_before = len(blocks)
    convolutions = sum(_collect_blocks(child, blocks) for child in module.children())
    has_smaller_block = len(blocks) > blocks_before
    # a list or dictionary of layers has no forward of its own
    is_called = getattr(type(module), "forward", None) is not nn.Module.forward
    if convolutions >= 2 and is_called and not has_smaller_block:
        blocks.append(module)
    return convolutions


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
