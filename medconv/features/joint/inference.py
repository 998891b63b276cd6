"""From the outputs of the networks to a label map and the values of an image, in validation and prediction.

Windows give a label map as those of other networks; the image's outputs are the mean over all windows and
flips.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.config import RunConfig
from medconv.data.case import Case
from medconv.data.datasets.common import read_json
from medconv.data.io.manifest import TABLE
from medconv.data.loading.patch import Batch
from medconv.features.image_level.output import column_of
from medconv.features.joint.targets import JointTargets
from medconv.inference.output import OutputDir
from medconv.inference.predictor import Forward, LabelMapForward, Predictor, check_finite
from medconv.inference.prepare import Input
from medconv.inference.slab_answer import LabelMapScores
from medconv.inference.sliding_window import SlidingWindow
from medconv.models.outputs import full_resolution
from medconv.training.validation import LabelMapValidation, Validated, in_whole_batches
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text
from medconv.utils.locks import held


class MapOutputs:
    """A network's outputs of the label map alone; those of the image are kept, for each window.

    Args: network: takes images (batch, channels, *spatial).
    """

    def __init__(self, network: Callable[[Tensor], Any], targets: JointTargets) -> None:
        self.network = network
        self.targets = targets
        self.of_image: list[Tensor] = []  # (windows, outputs of the image)

    def __call__(self, windows: Tensor) -> Tensor:
        maps, of_image = self.targets.split(full_resolution(self.network(windows)))
        self.of_image.append(of_image)
        return maps

    def answer(self) -> np.ndarray:
        """The answer for the image of these windows. Shape: (names,) float32."""
        mean = torch.cat(self.of_image).mean(0)
        answer: np.ndarray = self.targets.answer_of_image(mean).cpu().numpy()
        return answer


class JointValidation:
    """The Dice of a case, and its values beside the predicted ones. Args: as of `Family.validation`."""

    def __init__(self, config: RunConfig, targets: JointTargets, window: SlidingWindow) -> None:
        self.whole_batches = bool(config.perf.compile)
        self.targets = targets
        self.window = window

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated:
        window = self.window.in_small_batches(self.targets.num_outputs, batch["image"].device)
        if self.whole_batches:
            network = partial(in_whole_batches, network, window.batch_size)
        outputs = MapOutputs(network, self.targets)
        validated = LabelMapValidation(window, self.targets.of_answers)(outputs, batch, keeps_prediction)
        case = batch["case"]
        values = None
        if "values" in batch and not bool(batch["values"].isnan().all()):
            values = self.targets.of_image.label_values(batch["values"].tolist())
        row = {
            "dice": list(validated.rows[case].values()),
            "outputs": outputs.answer().tolist(),
            "values": values,
        }
        predicted = {**validated.predicted, "row": row} if validated.predicted else {}
        return replace(validated, rows={case: row}, predicted=predicted)


@dataclass(frozen=True)
class JointAnswer(LabelMapScores):
    """Args: outputs: the image's, (names,) float32, probabilities or numbers."""

    outputs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))


class JointForward(Forward):
    """Label maps as of other networks; the image's outputs are the mean over networks."""

    def __call__(
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> list[JointAnswer]:
        return [self._answer(case_input, keeps_logits, logit_folder) for case_input in inputs]

    def _answer(self, case_input: Input, keeps_logits: bool, logit_folder: Path | None) -> JointAnswer:
        # Of this case alone: other threads may predict others with these members
        kept, of_maps = [], []
        for member in self.members:
            assert isinstance(member.targets, JointTargets)
            outputs = MapOutputs(member.network, member.targets)
            kept.append(outputs)
            network: Any = outputs  # called as a network is
            of_maps.append(replace(member, network=network, targets=member.targets.of_answers))
        (scores,) = LabelMapForward(of_maps, self.device)([case_input], keeps_logits, logit_folder)
        mean = np.stack([outputs.answer() for outputs in kept]).mean(0)
        check_finite("outputs", self.members[0], case_input.arrays[0], torch.from_numpy(mean))
        return JointAnswer(**vars(scores), outputs=mean)


class JointOutput(OutputDir):
    """Where label maps go, and the table of values beside them; a case is done once its label map exists.

    The values of a case are in a file of its own, since several processes may work here; each makes the table
    of all of them when it ends.
    """

    result_name: ClassVar[str] = "label maps and values"

    def __init__(self, path: Path, targets: JointTargets, settings: Any, about: Any) -> None:
        super().__init__(path, settings, about)
        self._of_image = targets.of_image
        self._folders["values"] = ".json"

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        with super().open(cases, overwrite):
            yield
            with held(self._lock):
                self._write_table([case.id for case in cases])

    def write(self, predictor: Predictor, case: Case, scores: JointAnswer) -> None:  # type: ignore[override]
        # eight digits are all that float32 has
        numbers = [f"{value:.8g}" for value in scores.outputs]
        cells = [*self._of_image.prediction_cells(scores.outputs), *numbers]
        path = self.beside("values", case.id)
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(cells) + "\n")
        super().write(predictor, case, scores)

    def _write_table(self, first: Sequence[str]) -> None:
        """Args: first: cases that come first, in this order."""
        done = set(self._label_maps({}))
        order = dict.fromkeys(case_id for case_id in [*first, *sorted(done)] if case_id in done)
        columns = [*self._of_image.prediction_columns, *map(column_of, self._of_image.names)]
        rows = [[case_id, *read_json(self.beside("values", case_id))] for case_id in order]
        write_text(self.path / TABLE, csv_text([["case", *columns], *rows]))

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        is_ours = manifest.get("targets") == self.about["targets"]  # so the table is, too
        return self._label_maps(manifest) if is_ours else super()._existing(manifest)
