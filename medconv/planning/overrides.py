"""The values of a plan that the config sets itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medconv.utils.errors import Argument, ArgumentError


@dataclass(frozen=True)
class PlanOverrides:
    """The values of a plan that the caller sets itself; None: the planner decides.

    Args:
        dims_origin: what set `spatial_dims`, for the plan's table; None: the caller.
        divisible_by: what the network divides each axis of the patch by, beside the strides.
        residual_blocks: per stage of the encoder, of two convolutions each.
        decoder_convs: convolutions in each stage of the decoder.
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
    decoder_convs: int = 2
    image_level: bool = False  # the network takes whole images of one size and predicts values
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_stages", "max_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(name, f" must be 1 or more, or None, got {value}")
        if not isinstance(self.divisible_by, int) or self.divisible_by < 1:
            raise ArgumentError("divisible_by", f" must be a whole number from 1, got {self.divisible_by}")
        if self.slice_axis is not None and self.image_level:
            raise ArgumentError("slice_axis", " is for label maps; the network takes whole images")
        if self.resize is not None and not self.image_level:
            raise ArgumentError(
                "resize", " needs cases with values; label maps keep mm, by ", Argument("spacing_mm")
            )
        if self.resize is not None and any(n < 1 for n in self.resize):
            raise ArgumentError("resize", f" needs positive numbers of voxels, got {list(self.resize)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ArgumentError("batch_size", f" must be at least 1, got {self.batch_size}")

    def name(self, argument: str) -> str:
        """What the plan's table calls an argument."""
        return self.names.get(argument, argument)
