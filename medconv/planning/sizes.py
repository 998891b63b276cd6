"""The sizes of a plan: how much network, patch and batch a run can afford."""

from dataclasses import dataclass, replace

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
