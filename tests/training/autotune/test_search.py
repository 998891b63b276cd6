"""medconv/training/autotune/search.py: what perf=autotune measures, what it refuses, and that it leaves
the network alone.
"""

import logging
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from medconv.models.unet import UNet
from medconv.training.autotune import search
from medconv.training.autotune.search import Candidate, choices, measure
from medconv.training.autotune.trial import Choice, Trial, Work
from medconv.utils import hardware

OPEN = dict.fromkeys(("precision", "channels_last", "fast_norm", "activation_checkpointing", "compile"))


def work(network: nn.Module, batch: int = 2) -> Work:
    torch.manual_seed(0)
    image, label = torch.randn(batch, 1, 16, 16), torch.randint(2, (batch, 1, 16, 16))
    objective = lambda outputs, wanted: nn.functional.cross_entropy(outputs.float(), wanted[:, 0])  # noqa: E731
    return Work(network, objective, partial(torch.optim.AdamW, lr=1e-3), image, label)


def unet(norm: str = "instance") -> nn.Module:
    torch.manual_seed(0)
    return UNet(2, 1, 2, (4, 8), (2,), norm=norm)


def test_candidates_are_what_makes_sense_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "fast_bf16_cpu", lambda: True)
    assert [str(choice) for choice in choices(OPEN, unet(), gpu=False)] == [
        *("32-true", "32-true, channels_last", "32-true, channels_last, fast_norm"),
        *("bf16-mixed", "bf16-mixed, channels_last", "bf16-mixed, channels_last, fast_norm"),
    ]
    assert not any(choice.fast_norm for choice in choices(OPEN, unet("batch"), gpu=False))
    monkeypatch.setattr(hardware, "fast_bf16_cpu", lambda: False)
    assert {choice.precision for choice in choices(OPEN, unet(), gpu=False)} == {"32-true"}


def test_what_the_user_fixed_stays() -> None:
    fixed = {**OPEN, "precision": "64-true", "channels_last": False, "activation_checkpointing": "blocks"}
    assert choices(fixed, unet(), gpu=False) == [
        Choice("64-true", fast_depthwise=True, activation_checkpointing="blocks")
    ]


def test_the_fastest_is_first_and_nothing_else_changes() -> None:
    network = unet()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    kinds = [type(layer) for layer in network.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    found = measure(work(network), choices(OPEN, network, gpu=False), seconds=5)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert [type(layer) for layer in network.modules()] == kinds
    assert all(not candidate.remark and candidate.seconds and candidate.trial is None for candidate in found)
    assert found[0].per_sample <= min(candidate.per_sample for candidate in found) / search._TIE
    assert found[0].row()["seconds"] == pytest.approx(found[0].per_sample * 2)


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    job = work(unet())
    torch.manual_seed(3)
    measure(job, [Choice()], seconds=1)
    assert torch.equal(torch.rand(3), expected)


class _WrongInHalf(nn.Module):
    """As if a kernel for half precision were at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return 3 * y + torch.arange(2.0).view(1, 2, 1, 1) if y.dtype == torch.bfloat16 else y


def test_a_wrong_loss_is_discarded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = measure(work(_WrongInHalf()), [Choice(), Choice("bf16-mixed")], seconds=2)
    assert found[0].choice == Choice() and not found[0].remark
    assert found[1].remark.startswith("wrong loss")
    assert "perf=autotune discards bf16-mixed: its losses differ from plain fp32's" in caplog.text


class _Hungry(nn.Module):
    """Fits only where its activations are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        if type(self).__name__ == "_Hungry":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return self.body(x)


def test_checkpointing_only_where_memory_asks_for_it() -> None:
    found = measure(work(_Hungry()), [Choice()], seconds=2)
    assert found[0].choice == Choice(activation_checkpointing="pointwise") and not found[0].remark
    assert found[1].remark == "does not fit into memory"
    without = measure(work(_Hungry()), [Choice()], seconds=2, try_checkpointing=False)
    assert without[0].remark == "does not fit into memory" and without[0].row()["seconds"] is None


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="size"):
        measure(work(nn.Conv2d(3, 2, 3)), [Choice()], seconds=1)


def test_time_is_kept() -> None:
    network = unet()
    found = measure(work(network), choices(OPEN, network, gpu=False), seconds=0)
    tried = [candidate for candidate in found if candidate.seconds]
    assert tried == found[:1] and len(tried[0].seconds) == 1
    assert {candidate.remark for candidate in found[1:]} <= {"not tried: no time left"}


def test_a_larger_batch_is_taken_where_it_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {2: 1.0, 4: 1.2, 8: 1.6, 16: 3.2}
    monkeypatch.setattr(search, "_timed", lambda trial: (cost[len(trial.image)] / 1000, float(trial.step())))
    found = measure(work(unet()), [Choice()], seconds=10, try_batch_size=True)
    assert found[0].batch_size == 8
    assert found[-1].batch_size == 16 and found[-1].remark == "a sample is not 5 % cheaper"
    assert all(candidate.batch_size == 2 for candidate in measure(work(unet()), [Choice()], seconds=1))


def test_equal_candidates_are_decided_for_the_plainer() -> None:
    slow, plain, same = (Candidate(Choice(), 1, [s]) for s in (1.0, 0.50, 0.49))
    assert search._best([slow, plain, same]) is plain
    assert search._best([Candidate(Choice(), 1, [1.0], remark="wrong loss")]) is None


@pytest.mark.parametrize(
    "choice", [Choice("bf16-mixed"), Choice(channels_last=True, fast_norm=True)], ids=str
)
def test_a_trial_is_a_training_step(choice: Choice) -> None:
    job = work(unet())
    trial, plain = Trial(job, choice), Trial(job, Choice())
    losses = [(float(trial.step()), float(plain.step())) for _ in range(10)]
    assert losses[-1][1] < losses[0][1]
    for mine, wanted in losses:
        assert mine == pytest.approx(wanted, rel=0.03 if choice.precision != "32-true" else 1e-4)


class _Random(nn.Module):
    """Drops by chance, and not by a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.conv(x), 0.5, self.training)


def test_a_random_loss_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = measure(work(_Random()), [Choice(), Choice(channels_last=True)], seconds=2)
    assert not any(candidate.remark for candidate in found)
    assert "loss is random, so losses are not compared" in caplog.text


class _NotInHalf(_Random):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.dtype == torch.bfloat16:
            raise NotImplementedError("no such kernel")
        return y


def test_a_candidate_that_fails_is_out_and_the_others_stay() -> None:
    found = measure(work(_NotInHalf()), [Choice(), Choice("bf16-mixed")], seconds=2)
    assert found[0].choice == Choice() and found[1].remark == "fails: no such kernel"
