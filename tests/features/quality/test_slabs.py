"""Quality by slabs is that of all logits."""

import numpy as np
import pytest
from helpers.slabs import ENSEMBLES, SIZE, scores, thin_slabs  # noqa: F401 - a fixture of all tests

from medconv.features.quality.extra import Quality, uncertainty_of
from medconv.inference.sliding_window import LogitStream


@pytest.mark.parametrize("way", ["label map", "quality", "probabilities"])
@pytest.mark.parametrize("name", ENSEMBLES)
def test_logits_in_memory_do_not_grow_with_the_length(name, way, tmp_path, monkeypatch):
    """Of several networks, flips, regions and saved probabilities: values of the sums, and planes taken."""
    taken = {}
    take = LogitStream.take

    def noted(stream, first, stop):
        logits = take(stream, first, stop)
        taken[stream] = max(logits.numel(), taken.get(stream, 0))
        return logits

    monkeypatch.setattr(LogitStream, "take", noted)
    in_memory = []
    for length in (34, 102):
        taken.clear()
        folder = tmp_path if way == "probabilities" else None
        extras = [Quality()] if way == "quality" else []
        result = scores(ENSEMBLES[name](), False, extras, folder, size=(SIZE[0], length, SIZE[2]))
        assert result.label.shape[1] == length
        in_memory.append([(stream.num_values, values) for stream, values in taken.items()])
    assert in_memory[0] == in_memory[1] != []


@pytest.mark.parametrize("name", ENSEMBLES)
def test_quality_is_that_of_all_logits(name):
    models = ENSEMBLES[name]()
    by_slabs, at_once = (scores(models, keeps, [Quality()]) for keeps in (False, True))
    np.testing.assert_allclose(uncertainty_of(by_slabs), uncertainty_of(at_once), atol=1e-5)
    label_maps = by_slabs.answers[Quality.flag].label_maps
    assert len(label_maps) == len(models)
    for index, label in enumerate(label_maps):
        np.testing.assert_array_equal(label, scores([models[index]], False).label)
