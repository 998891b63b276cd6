"""Points with names: their heatmaps, loss and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from medconv.features.landmarks.errors import WORDS, Row, cells_of, summary_of
from medconv.features.landmarks.points import SLICER, SUFFIXES
from medconv.targets.base import Family, Targets, names_of
from medconv.targets.scores import MonitoredMetric, NamedScores

POINTS = Family(
    examine="medconv.features.landmarks.heatmaps:examine_points",
    labels="medconv.features.landmarks.heatmaps",
    validation="medconv.features.landmarks.inference:point_validation",
    forward="medconv.features.landmarks.inference:PointForward",
    output="medconv.features.landmarks.inference:OutputPoints",
    evaluate="medconv.features.landmarks.evaluation:evaluate",
    views="medconv.features.landmarks.views:PointViews",
)


@dataclass(frozen=True)
class LandmarkTargets(Targets):
    """A heatmap for each point, of height 1 there.

    Args:
        sigma_mm: of the heatmaps.
        threshold: a point whose peak is lower is absent.
        suffix: of files of points, in whose format predictions are written.
    """

    kind: ClassVar[str] = "landmarks"
    family: ClassVar[Family] = POINTS
    per_voxel: ClassVar[bool] = True
    exclusive: ClassVar[bool] = False
    can_swap_labels: ClassVar[bool] = True
    default_loss: ClassVar[str] = "heatmap"
    monitored: ClassVar[MonitoredMetric] = MonitoredMetric("val/mre", WORDS["mre"], higher_is_better=False)
    output_meaning: ClassVar[str] = (
        "sigmoid of each channel is the heatmap of the point of this name; it lies at the centre of mass "
        "around the highest voxel, and is absent where the highest value is below targets.threshold"
    )
    unbounded: ClassVar[bool] = True  # positions in mm
    labels_in_mm: ClassVar[bool] = True
    names: tuple[str, ...] = ()
    sigma_mm: float = 3.0
    threshold: float = 0.2
    suffix: str = SLICER

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        sigma_mm: Any = content.get("sigma_mm")
        threshold: Any = content.get("threshold")
        # `type`, as True and False are of class int
        if type(sigma_mm) not in (int, float) or not 0 < sigma_mm < math.inf:
            raise ValueError(f"landmarks need a positive sigma_mm, got {sigma_mm!r:.40}")
        if type(threshold) not in (int, float) or not 0 <= threshold < 1:
            raise ValueError(f"landmarks need a threshold from 0 to below 1, got {threshold!r:.40}")
        suffix: Any = content.get("suffix", SLICER)
        if suffix not in SUFFIXES:
            raise ValueError(f"landmarks need a suffix of {', '.join(SUFFIXES)}, got {suffix!r:.40}")
        names = names_of(content.get("names"))
        if not names:
            raise ValueError("landmarks need names")
        return cls(names, float(sigma_mm), float(threshold), suffix)

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self), "names": list(self.names)}

    @property
    def description(self) -> str:
        # one width and one threshold serve the mean of several networks
        return f"{super().description}; sigma_mm={self.sigma_mm:g}, threshold={self.threshold:g}"

    @property
    def num_outputs(self) -> int:
        return len(self.names)

    @property
    def scores(self) -> LandmarkScores:
        return LandmarkScores()

    def encode(self, label: Tensor) -> Tensor:
        """Shape: (batch, names, *spatial)."""
        return label.float()

    def random_labels(self, batch: int, patch_size: Sequence[int]) -> Tensor:
        return torch.rand(batch, len(self.names), *patch_size)

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        return loss(outputs.float(), encoded)


class LandmarkScores(NamedScores):
    """A row of a checkpoint's `validation` is that of `errors.row_of`."""

    title: ClassVar[str] = "points"
    words = WORDS

    def of_case(self, row: Row) -> dict[str, Any]:
        return summary_of([row])

    def means(self, rows: Sequence[Row]) -> dict[str, Any]:
        return summary_of(rows)

    def logged(self, rows: Mapping[str, Row], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        per_point = self.summary(rows)["mre_per_point"]
        return super().logged(rows, losses) | {f"mre/{name}": mm for name, mm in per_point.items()}

    def case_cells(self, row: Row) -> dict[str, Any]:
        return cells_of(row)

    def case_entry(self, row: Row) -> dict[str, Any]:
        return {"points": row}
