"""What a run does differently for label maps and for values of whole images: one question to the targets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the kinds of targets of one shape have in common, from training to evaluation.

    Each text names an object, "module:object", of a package that `targets` may not import; the core loads it
    where it needs it: `doors.load(targets.family.validation)`.

    Args:
        validation: (config, targets, window, store) -> `training.validation.Validation`.
        mixup: (alpha, seed) -> `training.task.Mixup`; "": samples are not mixed.
        views: (targets, cases, spacing_mm) -> pictures of cases; "": those of label maps.
    """

    validation: str
    mixup: str = ""
    views: str = ""


LABEL_MAPS = Family(validation="medconv.training.validation:label_map_validation")
WHOLE_IMAGES = Family(
    validation="medconv.features.image_level.validation:image_validation",
    mixup="medconv.features.image_level.mixup:Mixup",
    views="medconv.features.image_level.views:ImageLevelViews",
)
