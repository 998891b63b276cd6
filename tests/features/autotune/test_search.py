"""medconv/features/autotune/search.py: candidates, their measurement, and which are rejected."""

import logging

import pytest
import torch
from helpers.networks import unet
from helpers.trials import work
from torch import Tensor, nn

from medconv.features.autotune import search
from medconv.features.autotune.search import Candidate, choices, measure
from medconv.features.autotune.trial import Choice, Trial
from medconv.utils import hardware

AMPLE_S = 600  # more than a few steps take on any machine
OPEN = dict.fromkeys(("precision", "channels_last", "fast_norm", "activation_checkpointing", "compile"))


def test_candidates_fit_the_hardware_and_the_network(monkeypatch):
    monkeypatch.setattr(hardware, "fast_bf16_cpu", lambda: True)
    assert [str(choice) for choice in choices(OPEN, unet("instance"), gpu=False)] == [
        *("32-true", "32-true, channels_last", "32-true, channels_last, fast_norm"),
        *("bf16-mixed", "bf16-mixed, channels_last", "bf16-mixed, channels_last, fast_norm"),
    ]
    assert not any(choice.fast_norm for choice in choices(OPEN, unet("batch"), gpu=False))
    assert any(choice.fast_norm for choice in choices(OPEN, unet("batch"), gpu=True))
    monkeypatch.setattr(hardware, "fast_bf16_cpu", lambda: False)
    assert {choice.precision for choice in choices(OPEN, unet("instance"), gpu=False)} == {"32-true"}


def test_settings_of_the_user_stay():
    fixed = {**OPEN, "precision": "64-true", "channels_last": False, "activation_checkpointing": "blocks"}
    assert choices(fixed, unet("instance"), gpu=False) == [
        Choice("64-true", fast_depthwise=True, activation_checkpointing="blocks")
    ]


def test_the_fastest_is_first_and_the_network_is_unchanged():
    network = unet("instance")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    kinds = [type(layer) for layer in network.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    candidates = measure(work(network), choices(OPEN, network, gpu=False), seconds=AMPLE_S)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert [type(layer) for layer in network.modules()] == kinds
    assert all(c.seconds and not c.remark and c.trial is None for c in candidates)
    assert candidates[0].per_sample <= min(c.per_sample for c in candidates) / search._TIE
    assert candidates[0].row()["seconds"] == pytest.approx(candidates[0].per_sample * 2)


def test_measuring_draws_no_random_numbers_of_the_caller():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    job = work(unet("instance"))
    torch.manual_seed(3)
    measure(job, [Choice()], seconds=AMPLE_S)
    assert torch.equal(torch.rand(3), expected)


class _WrongInHalf(nn.Module):
    """Wrong in half precision, like a faulty kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return 3 * y + torch.arange(2.0).view(1, 2, 1, 1) if y.dtype == torch.bfloat16 else y


def test_a_candidate_with_a_wrong_loss_is_rejected_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        candidates = measure(work(_WrongInHalf()), [Choice(), Choice("bf16-mixed")], seconds=AMPLE_S)
    assert candidates[0].choice == Choice() and not candidates[0].remark
    assert candidates[1].remark.startswith("wrong loss")
    assert "perf=autotune discards bf16-mixed: its losses differ from plain fp32's" in caplog.text


class _Hungry(nn.Module):
    """Fits into memory only with activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        if type(self).__name__ == "_Hungry":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return self.body(x)


def test_checkpointing_is_tried_if_nothing_else_fits_into_memory():
    candidates = measure(work(_Hungry()), [Choice()], seconds=AMPLE_S)
    assert candidates[0].choice == Choice(activation_checkpointing="pointwise") and not candidates[0].remark
    assert candidates[1].remark == "does not fit into memory"
    without = measure(work(_Hungry()), [Choice()], seconds=AMPLE_S, try_checkpointing=False)
    assert without[0].remark == "does not fit into memory" and without[0].row()["seconds"] is None


def test_other_errors_are_raised():
    with pytest.raises(RuntimeError, match="size"):
        measure(work(nn.Conv2d(3, 2, 3)), [Choice()], seconds=AMPLE_S)


def test_no_candidate_is_tried_after_the_time_limit():
    network = unet("instance")
    candidates = measure(work(network), choices(OPEN, network, gpu=False), seconds=0)
    tried = [candidate for candidate in candidates if candidate.seconds]
    assert tried == candidates[:1] and len(tried[0].seconds) == 1
    assert {candidate.remark for candidate in candidates[1:]} <= {"not tried: no time left"}


def test_a_larger_batch_is_chosen_if_it_is_cheaper_per_sample(monkeypatch):
    cost = {2: 1.0, 4: 1.2, 8: 1.6, 16: 3.2}
    monkeypatch.setattr(search, "_timed", lambda trial: (cost[len(trial.image)] / 1000, float(trial.step())))
    candidates = measure(work(unet("instance")), [Choice()], seconds=AMPLE_S, try_batch_size=True)
    assert candidates[0].batch_size == 8
    assert candidates[-1].batch_size == 16 and candidates[-1].remark == "a sample is not 5 % cheaper"
    assert all(
        candidate.batch_size == 2
        for candidate in measure(work(unet("instance")), [Choice()], seconds=AMPLE_S)
    )


def test_the_plainest_of_equal_candidates_is_chosen():
    slow, plain, same = (Candidate(Choice(), 1, [s]) for s in (1.0, 0.50, 0.49))
    assert search._best([slow, plain, same]) is plain
    assert search._best([Candidate(Choice(), 1, [1.0], remark="wrong loss")]) is None


class _Random(nn.Module):
    """Dropout without a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.conv(x), 0.5, self.training)


def test_a_random_loss_is_not_compared(caplog):
    with caplog.at_level(logging.WARNING):
        candidates = measure(work(_Random()), [Choice(), Choice(channels_last=True)], seconds=AMPLE_S)
    assert not any(candidate.remark for candidate in candidates)
    assert "loss is random, so losses are not compared" in caplog.text


class _NotInHalf(_Random):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.dtype == torch.bfloat16:
            raise NotImplementedError("no such kernel")
        return y


def test_a_candidate_that_fails_is_rejected_and_the_others_stay():
    candidates = measure(work(_NotInHalf()), [Choice(), Choice("bf16-mixed")], seconds=AMPLE_S)
    assert candidates[0].choice == Choice() and candidates[1].remark == "fails: no such kernel"


@pytest.mark.parametrize(
    "choice", [Choice("bf16-mixed"), Choice(channels_last=True, fast_norm=True)], ids=str
)
def test_a_trial_is_a_training_step(choice):
    job = work(unet("instance"))
    trial, plain = Trial(job, choice), Trial(job, Choice())
    losses = [(float(trial.step()), float(plain.step())) for _ in range(10)]
    assert losses[-1][1] < losses[0][1]
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=0.03 if choice.precision != "32-true" else 1e-4)


def test_a_trial_has_no_dropout():
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout2d(0.5))
    trial = Trial(work(network), Choice())
    assert torch.equal(trial.forward(), trial.forward())
    assert network[1].training


def test_images_of_one_channel_are_channels_last():
    job = work(unet("instance"))
    assert Trial(job, Choice(channels_last=True)).image.stride() == (256, 1, 16, 1)
    assert Trial(job, Choice()).image.stride() == (256, 256, 16, 1)


def test_a_larger_batch_repeats_the_images():
    job = work(unet("instance"))
    larger = job.larger(3)
    assert torch.equal(larger.image[2:4], job.image) and torch.equal(larger.label[4:], job.label)
