"""medconv/utils/hardware.py: the setting reaches torch; what a user has set stays."""

import os
import subprocess
import sys

import pytest
import torch

from medconv.utils.hardware import expand_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that both are as before after the test
        monkeypatch.delenv(name)
    yield


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell"
)
def test_torch_takes_the_setting_although_it_is_imported_already():
    code = "import torch; from medconv.utils.hardware import expand_segments; expand_segments()"
    asked = f"{code}; print(torch._C._accelerator_getAllocatorSettings())"
    assert subprocess.check_output([sys.executable, "-c", asked], text=True) == "expandable_segments:True\n"


def test_what_the_user_has_set_stays(monkeypatch):
    for name in NAMES:
        with monkeypatch.context() as users:
            users.setenv(name, "max_split_size_mb:512")
            assert not expand_segments()
            assert [os.environ.get(each) for each in NAMES if each != name] == [None]


def test_a_process_that_has_used_its_gpu_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not expand_segments() and not any(name in os.environ for name in NAMES)
