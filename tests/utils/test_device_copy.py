"""medconv/utils/hardware.py: copies are complete before work that is queued later reads them."""

import pytest
import torch

from medconv.utils.hardware import DeviceCopies


def test_without_cuda_tensors_are_moved():
    tensor = torch.ones(3)
    assert DeviceCopies()({"image": tensor}, torch.device("cpu"))["image"] is tensor
    assert DeviceCopies()({"image": tensor}, torch.device("meta"))["image"].is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_queued_later_reads_complete_copies():
    device = torch.device("cuda", torch.cuda.current_device())
    copies = DeviceCopies()
    total = torch.zeros((), device=device)
    for number in range(20):
        image = torch.full((2**24,), float(number)).pin_memory()
        total += copies({"image": image}, device)["image"].double().mean()
    assert float(total) == sum(range(20))
