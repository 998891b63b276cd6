"""`schedule.patch=progressive`: training sees a part of each patch, which grows until it is whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, prod

import numpy as np

from medconv import config as configs
from medconv.config import RunConfig, TrainerConfig
from medconv.data.loading.patch import Batch
from medconv.training.optim.build import knows_progress
from medconv.utils.hardware import benchmark_kernels, uses_gpu

_FIRST_SHARE = 0.5  # share of a patch's edge at the start
_WHOLE_FROM = 0.8  # progress of the run from which on patches are whole
_MIN_EDGE = 2  # voxels at the coarsest stage
_LISTED = 1000  # points of a run at which its sizes are listed
# Share of a step on the whole patch that does not depend on its size: augmentation and optimizer
# (docs/planning.md)
_FIXED_COST = 0.2
# Sizes of growing patches if cuDNN tries its algorithms for each of them, which takes seconds
_TUNED_SIZES = 4


@dataclass(frozen=True)
class GrowingPatch:
    """Cuts the middle out of all patches of a batch, so that most steps become cheaper.

    An edge grows in proportion to the progress of the run, in steps of what the network divides it by.

    Args:
        divisor: of the network, per axis.
        max_sizes: of a run, 2 or more; None: no limit. For what is tuned or compiled for each size.
    Source: Fischer et al. 2024, arXiv:2407.07853.
    """

    divisor: Sequence[int]
    max_sizes: int | None = None

    def size(self, patch: Sequence[int], progress: float) -> tuple[int, ...]:
        """Voxels to train on, per axis.

        Args:
            patch: the whole patch, in voxels.
            progress: of the run, 0 to 1.
        """
        growth = min(1.0, progress / _WHOLE_FROM)  # 0 at the start, 1 for the whole patch
        if self.max_sizes is not None:
            increments = self.max_sizes - 1
            growth = floor(growth * increments) / increments
        share = _FIRST_SHARE + (1 - _FIRST_SHARE) * growth
        edges = []
        for whole_edge, divisor in zip(patch, self.divisor, strict=True):
            num_multiples = -(-round(share * whole_edge) // divisor)  # rounded up
            edge = max(_MIN_EDGE, num_multiples) * divisor
            edges.append(min(whole_edge, edge))
        return tuple(edges)

    def sizes(self, patch: Sequence[int]) -> list[tuple[int, ...]]:
        """All sizes of a run, in their order. Args: patch: the whole patch, in voxels."""
        by_progress = [self.size(patch, number / _LISTED) for number in range(_LISTED + 1)]
        return list(dict.fromkeys(by_progress))

    def costs(self, patch: Sequence[int], start: float = 0.0, end: float = 1.0) -> np.ndarray:
        """Time of a step, as a share of one on the whole patch, at 100 points between two progresses."""
        points = start + (end - start) * (np.arange(100) + 0.5) / 100
        voxels = np.array([prod(self.size(patch, progress)) for progress in points])
        return _FIXED_COST + (1 - _FIXED_COST) * voxels / prod(patch)

    def __call__(self, batch: Batch, progress: float) -> Batch:
        """Shape: image, label (batch, channels, *spatial) -> the same with `size` in place of spatial."""
        patch = batch["image"].shape[2:]
        size = self.size(patch, progress)
        slices = []
        for whole_edge, edge in zip(patch, size, strict=True):
            start = (whole_edge - edge) // 2
            slices.append(slice(start, start + edge))
        middle = (..., *slices)
        return {**batch, "image": batch["image"][middle], "label": batch["label"][middle]}


def growing_patch_of(config: RunConfig, divisor: Sequence[int] | None) -> GrowingPatch | None:
    """Cuts training batches to patches that grow; None: training sees whole patches.

    Args:
        config: resolved.
        divisor: of the network; None: it does not tell.
    Raises:
        ConfigError: `schedule.patch` is progressive where patches cannot grow.
    """
    if not may_grow(config):
        return None
    trainer = config.trainer
    if not config.derived.per_voxel:
        obstacle = "the data has values of whole images"
    elif divisor is None:
        obstacle = f"model._target_={config.model['_target_']} does not say what divides its input size"
    elif not knows_progress(config.scheduler):
        target = config.scheduler["_target_"]
        obstacle = (
            f"scheduler._target_={target} does not follow the run's progress: its function is not annotated "
            "`-> ProgressSchedule`"
        )
    elif not has_end(trainer):
        obstacle = "a run without an end has no progress"
    else:
        tunes_kernels = uses_gpu(trainer.accelerator) and benchmark_kernels(
            trainer.benchmark, trainer.accelerator, trainer.deterministic
        )
        return GrowingPatch(divisor, _TUNED_SIZES if tunes_kernels else None)
    if config.schedule.patch == "progressive":
        raise configs.ConfigError(f"schedule.patch=progressive: {obstacle}")
    return None


def may_grow(config: RunConfig) -> bool:
    """Whether patches grow if nothing about the data or the network is in the way."""
    if config.schedule.patch is not None:
        return config.schedule.patch == "progressive"
    # Code that is compiled for one size is faster than that for any size.
    return not (config.perf.compile or config.perf.cuda_graphs)


def has_end(trainer: TrainerConfig) -> bool:
    """Whether a time, a number of steps or of epochs ends a run, so that it has a progress."""
    return trainer.max_epochs != -1 or trainer.max_steps != -1 or trainer.max_time is not None
