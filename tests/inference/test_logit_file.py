"""medconv/inference/logit_file.py: planes come back, and a full disk is an error."""

import resource
import signal

import pytest
import torch

from medconv.inference.logit_file import LogitFile
from medconv.utils.atomic_io import NO_ROOM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_channels_come_back_as_they_were(tmp_path, dtype):
    """Slabs share planes."""
    logits = torch.randn(3, 9, 4, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    file = LogitFile(9, tmp_path)
    for first, stop in ((0, 4), (3, 5), (5, 9)):
        file.put(first, logits[:, first:stop])
    for planes in (slice(0, 5), slice(2, 4), slice(7, 9)):
        channels = file.channels(planes)
        assert len(channels) == 3
        for index, channel in enumerate(channels):
            assert torch.equal(channel, logits[index, planes])


def test_planes_that_are_there_are_not_written_again(tmp_path):
    file = LogitFile(3, tmp_path)
    file.put(0, torch.ones(1, 2, 4))
    file.put(1, torch.zeros(1, 2, 4))
    assert [float(plane.mean()) for plane in file.read(0, slice(0, 3))] == [1, 1, 0]


def test_the_file_has_no_name(tmp_path):
    """So that a killed process leaves nothing behind."""
    file = LogitFile(1, tmp_path)
    file.put(0, torch.ones(1, 1, 4))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        file = LogitFile(8, tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError) as error:
            file.put(0, torch.ones(2, 8, 32, 32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert error.value.errno in NO_ROOM
