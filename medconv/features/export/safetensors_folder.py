"""Weights to publish: a folder with model.safetensors, its metadata, and a card for the Hugging Face Hub.

`init.pretrained=hf://OWNER/NAME/model.safetensors` trains on from it, with the size of its plan.
"""

import json
from copy import deepcopy
from pathlib import Path

from torch import nn

import medconv
from medconv.config import tuples_to_lists
from medconv.features.export.graph import capture
from medconv.features.export.job import Format, Job, write_metadata
from medconv.features.export.metadata import Metadata
from medconv.inference.load import LoadedModel
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import size_text
from medconv.utils.optional_imports import needed

MODEL = "model.safetensors"


class WeightsFolder(Format):
    """The format `safetensors` of `medconv export`."""

    is_folder = True

    def check_packages(self) -> None:
        needed("safetensors", "safetensors", "writing safetensors")

    def write(self, path: Path, job: Job) -> None:
        captured = capture(job.model)
        file = path / MODEL
        parity = job.compare(_write_weights(file, job), captured.larger)
        metadata = job.describe(file, "safetensors", captured, parity)
        write_metadata(metadata, file)
        write_text(path / "README.md", card(job.model, metadata, job.name))

    def notes(self, model: LoadedModel, output: Path) -> list[str]:
        return [f"{output}, weights with their card, README.md: add the license before you publish them"]


SAFETENSORS = WeightsFolder()


def _write_weights(file: Path, job: Job) -> nn.Module:
    """Write the weights as plain layers have them.

    Returns:
        A network with the weights that the file holds.
    """
    from safetensors.torch import load_file, save

    network: nn.Module = job.model.network
    derived = job.content["medconv"]["config"]["derived"]
    # safetensors' own metadata are texts
    record = {
        "format": "pt",
        "medconv_version": medconv.__version__,
        "medconv": json.dumps({"config": {"derived": tuples_to_lists(derived)}}),
    }
    state = {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
    file.write_bytes(save(state, record))
    written = deepcopy(network)
    written.load_state_dict(load_file(file))
    return written


def card(model: LoadedModel, metadata: Metadata, name: str) -> str:
    """The README.md of the folder, with the header that the Hub reads."""
    training = metadata["training"]
    validation = metadata["validation"]
    scores = {key: value for key, value in validation["scores"].items() if isinstance(value, float)}
    task = "image-to-image" if model.targets.per_voxel else "image-classification"
    if model.targets.answers_classes:
        task = "image-segmentation"
    score_lines = "\n".join(f"- {key.removeprefix('val/')}: {value:.4f}" for key, value in scores.items())
    return f"""---
library_name: medconv
pipeline_tag: {task}
tags: [medical]
---

# {name}

Predicts {", ".join(model.targets.names)} from {", ".join(model.modalities)}.
Trained by medconv {medconv.__version__} on {training["cases"]} cases of {training["dataset"]}.
Its grid is {size_text(model.preprocessing.spacing_mm)} mm; `{MODEL}.json` has all of the preprocessing,
and the meaning of each output.

Scores of its {validation["cases"]} validation cases, none of which it was trained on:

{score_lines}

Train on from these weights, on classes of your own:

```bash
medconv train data=... init.pretrained=hf://OWNER/{name}/{MODEL}
```

License of the weights: none is stated yet. The license of the training data decides which one may be.
"""
