"""Which library and memory format torch would take on a GPU for each convolution; asked without a GPU.

Needs torch's CUDA wheel: its fake tensors on `cuda` ask the selectors of the real operations. The CPU wheel has
no cuDNN to select, and its fake convolutions forget channels-last (pytorch#177277).
"""

from typing import Any

import pytest
import torch
from monai.networks.nets import SegResNet
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models import UNet
from medconv.models.layers import fast_norm
from medconv.performance.switches import apply_switches, memory_format, to_memory_format

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA wheel")

LARGE = 4096  # elements; a copy of a smaller tensor costs nothing
_DTYPE = torch.float16  # for bf16 the selectors would ask the driver whether this GPU has it
# Channels, patch and stages as plans have them in 3D and 2D
NETWORKS = {
    "3D": (3, (2, 1, 128, 128, 128), (32, 64, 128, 256, 320, 320), (2, 2, 2, 2, 2)),
    "anisotropic": (3, (2, 2, 16, 192, 192), (32, 64, 128, 256), ((1, 2, 2), 2, 2)),
    "2D": (2, (12, 1, 256, 256), (32, 64, 128, 256, 512), (2, 2, 2, 2)),
}


class Convolutions(TorchDispatchMode):
    """Notes what is selected for each convolution, and the operations whose large results lose channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.backends = []
        self.formats = []
        self.contiguous = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten.convolution:
            self._select(*args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() > LARGE and _lost_format(tensor):
                self.contiguous.append(str(func))
        return result

    def _select(self, image: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> None:
        backend = torch._C._select_conv_backend(image, weight, bias, *settings)
        self.backends.append(backend.name)
        select_format = torch._C._conv_determine_backend_memory_format
        self.formats.append(select_format(image, weight, backend))


def _lost_format(tensor):
    layout = CHANNELS_LAST.get(tensor.ndim)
    return layout is not None and not tensor.is_contiguous(memory_format=layout)


@pytest.fixture(autouse=True)
def norms_by_triton(monkeypatch):
    """As where there is a GPU."""
    monkeypatch.setattr(fast_norm, "uses_triton", fast_norm.is_channels_last)


def forward(network, shape, channels_last, gathered):
    """A forward pass of training in fp16 on a GPU that is not there; autograd would ask its driver.

    Args:
        gathered: weights as FSDP2 gathers them.
    """
    layout = memory_format(channels_last, spatial_dims=len(shape) - 2)
    with FakeTensorMode(), torch.device("cuda"):
        weights = {
            name: torch.empty_strided(
                parameter.shape,
                torch.empty(parameter.shape, device="meta").stride() if gathered else parameter.stride(),
                dtype=_DTYPE,
            )
            for name, parameter in network.named_parameters()
        }
        buffers = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in network.named_buffers()}
        image = to_memory_format(torch.empty(shape, dtype=_DTYPE), layout)
        with torch.no_grad(), Convolutions() as seen:
            functional_call(network, {**weights, **buffers}, (image,))
    return seen


def built(name):
    """The network, and the shape of its images."""
    dims, shape, channels, strides = NETWORKS[name]
    with torch.device("meta"):
        network = UNet(dims, shape[1], 4, channels, strides, norm="batch")
        return apply_switches(network, channels_last=True, fast_norm=True), shape


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_of_the_default_network_runs_in_channels_last(name, gathered):
    """Also with weights that FSDP2 has gathered, which are contiguous whatever their strides were."""
    network, shape = built(name)
    seen = forward(network, shape, channels_last=True, gathered=gathered)
    layers = [m for m in network.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    assert len(seen.backends) == len(layers)
    assert set(seen.backends) <= {"Cudnn", "CudnnTranspose"}
    assert set(seen.formats) == {CHANNELS_LAST[len(shape)]}
    assert not seen.contiguous


def test_group_norms_leave_channels_last_no_more():
    with torch.device("meta"):
        network = SegResNet(3, 16, 1, 3)
        plain = apply_switches(network, channels_last=True)
        before = forward(plain, (2, 1, 64, 64, 64), channels_last=True, gathered=False).contiguous
        swapped = apply_switches(network, channels_last=True, fast_norm=True)
    after = forward(swapped, (2, 1, 64, 64, 64), channels_last=True, gathered=False).contiguous
    assert len(before) > 50 and not after


def test_a_contiguous_image_is_seen():
    """The tests above can fail: without channels-last every layer's result is contiguous."""
    with torch.device("meta"):
        network = UNet(3, 1, 2, (32, 64), (2,), norm="batch")
    seen = forward(network, (2, 1, 32, 32, 32), channels_last=False, gathered=False)
    assert torch.channels_last_3d not in seen.formats and seen.contiguous
