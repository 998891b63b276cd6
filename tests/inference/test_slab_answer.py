"""medconv/inference/slab_answer.py: answers by slabs are those of all logits at once."""

import numpy as np
import pytest
import torch
from helpers.slabs import ENSEMBLES, SIZE, model, scores, thin_slabs  # noqa: F401 - a fixture of all tests
from torch import nn

from medconv.inference.slab_answer import mean_logits, with_cpu_fallback
from medconv.inference.sliding_window import LogitStream
from medconv.targets.regions import RegionTargets


@pytest.mark.parametrize("name", ENSEMBLES)
def test_the_label_map_is_that_of_all_logits(name, monkeypatch):
    """None of 3315 voxels differs, although the sums are made in another order."""
    models = ENSEMBLES[name]()
    planes_taken = []
    take = LogitStream.take

    def noted(stream, first, stop):
        planes_taken.append(stop - first)
        return take(stream, first, stop)

    at_once = scores(models, True)
    monkeypatch.setattr(LogitStream, "take", noted)
    by_slabs = scores(models, False)
    assert by_slabs.kept is None and at_once.kept is not None
    assert max(planes_taken) <= 9  # of at least 12, so none of these has another way
    label = by_slabs.answer()
    np.testing.assert_array_equal(label, at_once.answer())
    probabilities = torch.from_numpy(np.stack(list(at_once.probabilities())))
    np.testing.assert_array_equal(label, models[0].targets.decode_mean(probabilities))
    assert len(np.unique(label)) >= 2


@pytest.mark.parametrize("keeps_logits", [True, False])
@pytest.mark.parametrize(
    ("name", "counts"),
    [("other windows", (2, 1)), ("other spacing", (2, 1)), ("regions, other spacing", (1, 1))],
)
def test_each_network_of_a_mixed_ensemble_counts_the_same(name, counts, keeps_logits):
    """Networks of one preprocessing have a mean of logits, those of several a mean of probabilities."""
    models = ENSEMBLES[name]()
    first, second = models[: counts[0]], models[counts[0] :]
    mixed = scores(models, keeps_logits)
    parts = [scores(part, True) for part in (first, second)]
    shares = [count / len(models) for count in counts]
    if first[0].preprocessing == second[0].preprocessing:
        (one, other) = [torch.from_numpy(np.stack(list(part.probabilities()))).logit() for part in parts]
        expected = (shares[0] * one + shares[1] * other).sigmoid()
    else:
        expected = sum(
            share * torch.from_numpy(np.stack(list(part.probabilities())))
            for share, part in zip(shares, parts, strict=True)
        )
    if keeps_logits:
        probabilities = torch.from_numpy(np.stack(list(mixed.probabilities())))
        torch.testing.assert_close(probabilities, expected, atol=2e-3, rtol=0)
    label = models[0].targets.decode_mean(expected).numpy()
    assert (mixed.answer() != label).mean() < 2e-3


@pytest.mark.parametrize(("highest", "dtype"), [(255, np.uint8), (256, np.int16)])
def test_a_label_map_in_work_has_one_byte_a_voxel_where_that_is_enough(highest, dtype):
    targets = RegionTargets(("lesion", "core"), ((1, highest), (highest,)), None, (1, highest))
    result = scores([model(3, 1.4, targets=targets)], False)
    assert result.label.dtype == dtype
    label = result.answer()
    assert label.dtype == np.int16 and set(np.unique(label)) == {0, 1, highest}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_probabilities_from_a_file_are_those_from_memory(name, tmp_path):
    """Up to the order of sums; the file has no name, so nothing stays behind."""
    models = ENSEMBLES[name]()
    from_file = scores(models, keeps_logits=False, logit_folder=tmp_path)
    at_once = scores(models, keeps_logits=True)
    pairs = list(zip(from_file.probabilities(), at_once.probabilities(), strict=True))
    assert len(pairs) == 2 and not list(tmp_path.iterdir())
    for channel, expected in pairs:
        np.testing.assert_allclose(channel, expected, atol=1e-6)
    np.testing.assert_array_equal(from_file.answer(), at_once.answer())


def test_probabilities_by_slabs_are_a_softmax_of_the_enlarged_logits():
    result = scores([model(0, 1.4)], keeps_logits=True)
    logits = torch.nn.functional.interpolate(result.logits[0][None], SIZE, mode="trilinear")[0]
    probabilities = np.stack(list(result.probabilities()))
    np.testing.assert_allclose(probabilities, logits.softmax(0).numpy(), atol=1e-5)


def test_a_weighted_mean_is_that_of_all_networks():
    models = ENSEMBLES["other windows"]()
    (mean,) = scores(models, keeps_logits=True).logits
    each = [scores([one], keeps_logits=True).logits[0] for one in models]
    torch.testing.assert_close(mean, torch.stack(each).mean(0), atol=1e-5, rtol=1e-4)
    logits = [torch.ones(1), 4 * torch.ones(1)]
    assert float(mean_logits(logits, [2 / 3, 1 / 3])) == pytest.approx(2)


def test_logits_that_are_not_finite_are_an_error_of_the_network():
    broken = model(0, 1.4)
    nn.init.constant_(broken.network.bias, float("nan"))
    with pytest.raises(ValueError, match=r"the network's logits are not finite"):
        scores([broken], keeps_logits=False)


def test_the_cpu_takes_over_where_gpu_memory_runs_out():
    class Logits:
        moved = False

        def cpu(self) -> "Logits":
            self.moved = True
            return self

    def compute(logits):
        if not logits.moved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 7

    assert with_cpu_fallback(compute, Logits()) == 7
