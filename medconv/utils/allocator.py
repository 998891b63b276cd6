"""Settings of torch's allocator of GPU memory."""

import logging
import os

import torch

# torch reads the first one that is set; the second one is its older name
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

log = logging.getLogger(__name__)


def expand_segments() -> bool:
    """Let the memory that small tensors have left grow, so that larger ones use it again.

    Without it memory is taken in segments that cannot be joined: tensors that grow during a run take new ones
    beside those of their smaller predecessors, until the memory is full and all unused ones are given back.
    What the user has set stays. torch reads the setting once, at the first use of a GPU.

    Returns:
        Whether it was set.
    """
    if any(name in os.environ for name in _SETTINGS) or torch.cuda.is_initialized():
        return False
    os.environ[_SETTINGS[0]] = "expandable_segments:True"
    log.info("GPU memory: %s=%s, since patches grow", _SETTINGS[0], os.environ[_SETTINGS[0]])
    return True
