"""A label map and the values of an image: one network, two losses, two answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from medconv.features.image_level.targets import ImageLevelTargets
from medconv.features.joint.scores import JointScores
from medconv.targets.base import Family
from medconv.targets.label_map import LabelMapTargets

_FEW = 0.1  # share of the training cases; a class with fewer is rare

JOINT = Family(
    validation="medconv.features.joint.inference:JointValidation",
    forward="medconv.features.joint.inference:JointForward",
    output="medconv.features.joint.inference:JointOutput",
    views="medconv.features.joint.views:JointViews",
)


@dataclass(frozen=True)
class JointTargets(LabelMapTargets):
    """Classes of voxels, and values of the image.

    The outputs of the label map come first. Each further channel says for every voxel what it adds to an
    output of the image, which is the mean over all voxels: a linear layer on the mean of the last features,
    in any network.

    Args:
        of_image: the image's values, and what its outputs mean.
    Source: class activation maps, Zhou et al. 2016, arXiv:1512.04150.
    """

    kind: ClassVar[str] = "joint"
    family: ClassVar[Family] = JOINT
    answers_classes: ClassVar[bool] = False
    can_swap_labels: ClassVar[bool] = False
    mean_of_outputs: ClassVar[bool] = False
    default_loss: ClassVar[str] = "joint"
    output_meaning: ClassVar[str] = (
        "softmax over the channels of background and targets.names is the label map; the mean of each "
        "further channel over the voxels of a window, and over windows, is an output of targets.of_image: "
        "softmax (multiclass), sigmoid (multilabel; ordinal: above this grade), or times "
        "targets.of_image.stds plus means (regression)"
    )
    of_image: ImageLevelTargets = field(kw_only=True)

    @classmethod
    def from_fields(cls, content: Mapping[str, Any], **_: Any) -> Self:
        return super().from_fields(content, of_image=ImageLevelTargets.from_plain(content.get("of_image")))

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "of_image": self.of_image.plain()}

    @property
    def of_answers(self) -> LabelMapTargets:
        return LabelMapTargets(self.names, self.values, self.ignore, also_ignored=self.also_ignored)

    @property
    def of_table(self) -> ImageLevelTargets:
        return self.of_image

    @property
    def description(self) -> str:
        return f"{self.of_answers.description}; {self.of_image.description}"

    @property
    def num_outputs(self) -> int:
        return len(self.names) + 1 + self.of_image.num_outputs

    @property
    def output_names(self) -> tuple[str, ...]:
        return (*self.names, *self.of_image.output_names)

    @property
    def scores(self) -> JointScores:  # type: ignore[override]
        return JointScores(self.names, self.of_answers.scores, self.of_image.scores)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the label map, and of the image: numbers without units.

        Shape: (batch, outputs, *spatial) -> (batch, those of the map, *spatial), (batch, those of the image).
        """
        num_of_maps = len(self.names) + 1
        return outputs[:, :num_of_maps], outputs[:, num_of_maps:].float().flatten(2).mean(2)

    def answer_of_image(self, outputs: Tensor) -> Tensor:
        """Shape: (..., outputs of the image) -> (..., names), probabilities or numbers."""
        return self.of_image.decode(self.of_image.in_units(outputs))

    def compare(
        self,
        loss: Any,
        outputs: Tensor,
        encoded: Tensor,
        annotated: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """The sum of both, by a `JointLoss`; a sample without values, NaN, has that of the label map."""
        maps, of_image = self.split(outputs)
        total = self.of_answers.compare(loss.segmentation, maps, encoded, annotated)
        if values is None:
            return total
        known = ~values.isnan().all(1)
        if not known.any():
            return total
        in_units = self.of_image.in_units(of_image[known])
        truth = self.of_image.encode(values[known])
        of_values = self.of_image.compare(loss.of(self.of_image), in_units, truth)
        return total + float(loss.value_weight) * of_values

    def try_loss(self, loss: Any, spatial_dims: int) -> str | None:
        if not hasattr(loss, "segmentation"):
            return "has no parts for the label map and for the values of images, as loss=joint has"
        problem = self.of_answers.try_loss(loss.segmentation, spatial_dims)
        if problem:
            return f"segmentation {problem}"
        problem = self.of_image.try_loss(loss.of(self.of_image), spatial_dims)
        return f"value {problem}" if problem else None

    def fitted(self, values: np.ndarray) -> Self:
        return replace(self, of_image=self.of_image.fitted(known(values)))

    def output_counts(self, values: np.ndarray) -> list[int] | None:
        """As if all cases had a value, so that weights of classes are those of the known ones."""
        of_known = known(values)
        counts = self.of_image.output_counts(of_known)
        if counts is None or not len(of_known):
            return counts
        return [round(count * len(values) / len(of_known)) for count in counts]

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        """Also warns of rare classes."""
        values = known(values)
        if not len(values):
            raise ValueError(f"no {split} case has a value, expected some")
        warning = self.of_image.check_examples(values, split)
        warnings = [warning] if warning else []
        counts = self.of_image.class_counts(values) or []
        for name, count in zip(self.of_image.names, counts, strict=False):
            if split == "training" and 0 < count < _FEW * len(values):
                warnings.append(
                    f"{count} of {len(values)} training cases have {name}, so a network that never predicts "
                    "it is mostly right; look at balanced_accuracy or the AUC"
                )
        return "; ".join(warnings) or None


def known(values: np.ndarray) -> np.ndarray:
    """The cases with a value. Shape: (cases, values) -> (known cases, values)."""
    of_known: np.ndarray = values[~np.isnan(values).all(1)]
    return of_known
