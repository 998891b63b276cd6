"""What bounds a plan: how much network, patch and batch a run can afford, and values that a user sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medconv.utils.errors import ArgumentError


@dataclass(frozen=True)
class Size:
    """Limits of a plan.

    Args:
        memory_share: of the memory budget, which bounds the patch.
        base_channels: of the finest stage. max_channels: of any stage; both by spatial dimensions.
        max_batch: of patches; by spatial dimensions.
        enough_steps: a run takes the size if so many of its steps fit into the run's time.
        coarsens: the grid becomes coarser until a patch covers the median image; else it is that of the
            images, as nnU-Net has it.
    """

    name: str
    memory_share: float
    base_channels: int
    max_channels: dict[int, int]
    max_batch: dict[int, int]
    enough_steps: int
    coarsens: bool = True


# From how many steps on, and from how often a network has seen each case, more time hardly raises its score,
# or lowers it (experiments/do-hours-pay.md)
ENOUGH_STEPS = 2000
ENOUGH_VIEWS = 50

# nnU-Net's channels; its batch is larger, for longer runs.
_LARGE = Size(
    name="large",
    memory_share=1.0,
    base_channels=32,
    max_channels={2: 512, 3: 320},
    max_batch={2: 12, 3: 4},
    enough_steps=2000,
)

# Largest first. `enough_steps` is a first guess from medium on: docs/planning.md has what was measured.
SIZES = {
    size.name: size
    for size in (
        replace(_LARGE, name="full", enough_steps=20_000, coarsens=False),
        _LARGE,
        Size(
            name="medium",
            memory_share=0.5,
            base_channels=24,
            max_channels={2: 256, 3: 192},
            max_batch={2: 8, 3: 2},
            enough_steps=1000,
        ),
        Size(
            name="small",
            memory_share=0.25,
            base_channels=16,
            max_channels={2: 128, 3: 128},
            max_batch={2: 8, 3: 2},
            enough_steps=200,
        ),
        Size(
            name="tiny",
            memory_share=0.1,
            base_channels=8,
            max_channels={2: 64, 3: 64},
            max_batch={2: 8, 3: 2},
            enough_steps=0,
        ),
    )
}


def need_size(name: str) -> Size:
    """The size of that name.

    Raises:
        ValueError: there is no such size.
    """
    if name not in SIZES:
        raise ArgumentError("size", f" must be {', '.join(SIZES)} or None, got {name}")
    return SIZES[name]


@dataclass(frozen=True)
class EarlierPlan:
    """Choices of another run's plan, which a run takes over where its config leaves them open.

    Args:
        origin: why, for the plan's table.
        size: a name of `SIZES`.
        takes_slices: of volumes.
        slice_axis: across which; None: weights, which fit slices across any axis.
        normalisation: of each channel.
    """

    origin: str
    memory_gb: float | None = None
    size: str | None = None
    takes_slices: bool = False
    slice_axis: int | None = None
    normalisation: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanOverrides:
    """The values of a plan that the caller sets itself; None: the planner decides.

    Args:
        dims_origin: what set `spatial_dims`, for the plan's table; None: the caller.
        divisible_by: what the network divides each axis of the patch by, beside the strides.
        residual_blocks: per stage of the encoder, of two convolutions each.
        convs_per_stage: convolutions of a stage, one number or one per stage; with residual blocks, in the
            decoder.
        names: argument to what the plan's table calls it, such as a config key; others have their own name.
    """

    spatial_dims: int | None = None
    slice_axis: int | None = None
    dims_origin: str | None = None
    spacing_mm: Sequence[float] | None = None
    patch_size: Sequence[int] | None = None
    batch_size: int | None = None
    normalisation: str | Sequence[str] | None = None
    strides: Sequence[Any] | None = None
    kernel_sizes: Sequence[Any] | None = None
    channels: Sequence[int] | None = None
    max_stages: int | None = None
    max_batch_size: int | None = None
    resize: Sequence[int] | None = None
    divisible_by: int = 1
    residual_blocks: Sequence[int] | None = None
    convs_per_stage: int | Sequence[int] = 2
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.divisible_by, int) or self.divisible_by < 1:
            raise ArgumentError("divisible_by", f" must be a whole number from 1, got {self.divisible_by}")

    def name(self, argument: str) -> str:
        """What the plan's table calls an argument."""
        return self.names.get(argument, argument)
