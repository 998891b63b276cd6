"""What a run does differently for label maps and for values of whole images: one question to the targets."""

from dataclasses import dataclass
from typing import Any

from medconv import doors


@dataclass(frozen=True)
class Family:
    """What a family of targets has in the place of what the core does with label maps.

    Each text names an object, "module:object"; "": the core's own. The core asks in one place for each:
    `targets.family.own("forward")`.

    Args:
        examine: (case, image, dataset, report): completes the report, in the place of the label map.
        samples: module of `ImageDataset` and `ImageCases`, as `data.loading.datamodule.TrainingSamples` says.
        validation: (config, targets, window, store) -> `training.validation.Validation`.
        mixup: (alpha, seed) -> `training.task.Mixup`; "": samples are not mixed.
        forward: (members, device, batch_size) -> `inference.forward.Forward`.
        output: (folder, targets, settings, about) -> `inference.output.Output`.
        evaluate_table: (predictions, labels, compare, **options) -> `evaluation.results.Evaluation`, of
            predictions that are a table; "": they are images.
        views: (targets, cases, spacing_mm) -> `features.pictures.cases.CaseViews`.
    """

    examine: str = ""
    samples: str = ""
    validation: str = ""
    mixup: str = ""
    forward: str = ""
    output: str = ""
    evaluate_table: str = ""
    views: str = ""

    def own(self, name: str) -> Any:
        """The object of this name; None: the core's."""
        entry = getattr(self, name)
        return doors.load(entry) if entry else None


LABEL_MAPS = Family()
