"""medconv/training/autotune/candidates.py: which switches are tried."""

import pytest
from helpers.networks import unet

from medconv.training.autotune.candidates import choices
from medconv.training.autotune.trial import Choice
from medconv.utils import hardware

OPEN = dict.fromkeys(("precision", "channels_last", "fast_norm", "activation_checkpointing", "compile"))


def test_candidates_fit_the_hardware_and_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "fast_bf16_cpu", lambda: True)
    assert [str(choice) for choice in choices(OPEN, unet("instance"), gpu=False)] == [
        *("32-true", "32-true, channels_last", "32-true, channels_last, fast_norm"),
        *("bf16-mixed", "bf16-mixed, channels_last", "bf16-mixed, channels_last, fast_norm"),
    ]
    assert not any(choice.fast_norm for choice in choices(OPEN, unet("batch"), gpu=False))
    assert any(choice.fast_norm for choice in choices(OPEN, unet("batch"), gpu=True))
    monkeypatch.setattr(hardware, "fast_bf16_cpu", lambda: False)
    assert {choice.precision for choice in choices(OPEN, unet("instance"), gpu=False)} == {"32-true"}


def test_settings_of_the_user_stay() -> None:
    fixed = {**OPEN, "precision": "64-true", "channels_last": False, "activation_checkpointing": "blocks"}
    assert choices(fixed, unet("instance"), gpu=False) == [
        Choice("64-true", fast_depthwise=True, activation_checkpointing="blocks")
    ]
