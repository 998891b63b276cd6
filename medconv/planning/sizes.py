"""The sizes of a plan: how much network, patch and batch a run can afford."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Limits of a plan.

    Args:
        memory_share: of the memory budget, which bounds the patch.
        base_channels: of the finest stage. max_channels: of any stage; both by spatial dimensions.
        max_batch: of patches; by spatial dimensions.
        enough_steps: a run takes the size if so many of its steps fit into the run's time.
    """

    name: str
    memory_share: float
    base_channels: int
    max_channels: dict[int, int]
    max_batch: dict[int, int]
    enough_steps: int


# Largest first. `large` has nnU-Net's channels; its batch is smaller, for short runs. `enough_steps` is a
# first guess for medium and large: docs/planning.md has what was measured.
SIZES = {
    size.name: size
    for size in (
        Size("large", 1.0, 32, {2: 512, 3: 320}, {2: 12, 3: 4}, 2000),
        Size("medium", 0.5, 24, {2: 256, 3: 192}, {2: 8, 3: 2}, 1000),
        Size("small", 0.25, 16, {2: 128, 3: 128}, {2: 8, 3: 2}, 200),
        Size("tiny", 0.1, 8, {2: 64, 3: 64}, {2: 8, 3: 2}, 0),
    )
}


def need_size(name: str) -> Size:
    """Raises: ValueError: there is no such size."""
    if name not in SIZES:
        raise ValueError(f"plan.size must be {', '.join(SIZES)} or null, got {name}")
    return SIZES[name]
