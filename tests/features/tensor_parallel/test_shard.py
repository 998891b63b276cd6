"""medconv/features/tensor_parallel/shard.py: two processes against one, in double precision, and the bytes that
they send.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from helpers import ranks
from helpers.waiting import PATIENCE_S
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from medconv.features.tensor_parallel.shard import (
    clip_grad_norm,
    largest_share,
    pair_of,
    shard_convs,
    ways_of,
)
from medconv.models.unet import UNet
from medconv.training.optim.muon import Muon

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {
    "instance": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
}
SIZE = (7, 6, 5)
FULL = StateDictOptions(full_state_dict=True)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def layers(dims, **settings):
    """Odd numbers of channels; a layer on both sides, so that gradients pass through."""
    conv = CONV[dims]
    return nn.Sequential(conv(2, 5, 3), conv(5, 7, 3, padding=1, **settings), nn.ReLU(), conv(7, 2, 1))


def block(dims, norm):
    conv, norms = CONV[dims], NORM[norm][dims]
    inner = [conv(4, 7, 3, padding=1), norms(7, affine=True), nn.LeakyReLU(0.1), conv(7, 5, 3)]
    return nn.Sequential(conv(2, 4, 1), nn.Sequential(*inner, norms(5, affine=True)), conv(5, 2, 1))


CASES = {
    **{f"{way} {d}d": (lambda d=d: layers(d), {"^1$": way}, d) for way in ("out", "in") for d in (1, 2, 3)},
    "out, strided, reflected, no bias": (
        lambda: layers(2, stride=2, dilation=2, padding_mode="reflect", bias=False),
        {"^1$": "out"},
        2,
    ),
    "in, strided, reflected, no bias": (
        lambda: layers(2, stride=2, padding_mode="reflect", bias=False),
        {"^1$": "in"},
        2,
    ),
    "out, then in": (lambda: layers(3), {"^1$": "out", "^3$": "in"}, 3),
    **{f"pair {n} {d}d": (lambda d=d, n=n: block(d, n), {"^1$": "pair"}, d) for n in NORM for d in (2, 3)},
    "our U-Net": (
        lambda: UNet(3, 2, 2, channels=[4, 6], strides=[2], norm="instance"),
        {r"encoder\.0$": "pair", r"encoder\.1\.0": "out", r"encoder\.1\.3": "in", r"decoder": "pair"},
        3,
    ),
}


def step(network, x, clip):
    """Two steps of gradient descent; outputs and the input's gradient."""
    optimizer, results = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(2):
        image = x.clone().requires_grad_()
        y = network(image)
        optimizer.zero_grad()
        y.square().mean().backward()
        results += [y.detach(), image.grad]
        results.append(torch.as_tensor(clip()))
        optimizer.step()
    return results


class Traffic:
    """Counts the bytes that a process sends in torch's collectives, as their usual algorithm, the ring, does."""

    def __init__(self) -> None:
        self.bytes, size = 0.0, distributed.get_world_size()
        self._real = distributed.all_reduce, distributed.all_gather_into_tensor
        self._share = (size - 1) / size

    def __enter__(self) -> "Traffic":
        def all_reduce(tensor, **settings):
            self.bytes += 2 * self._share * tensor.nbytes
            return self._real[0](tensor, **settings)

        def all_gather_into_tensor(out, tensor, **settings):
            self.bytes += self._share * out.nbytes
            return self._real[1](out, tensor, **settings)

        distributed.all_reduce, distributed.all_gather_into_tensor = all_reduce, all_gather_into_tensor
        return self

    def __exit__(self, *_: object) -> None:
        distributed.all_reduce, distributed.all_gather_into_tensor = self._real


def compare(name, mesh):
    build, plan, dims = CASES[name]
    torch.manual_seed(0)
    plain = build().double()
    x = torch.randn(2, 2, *((8,) * dims if "U-Net" in name else SIZE[:dims]), dtype=torch.float64)
    torch.manual_seed(distributed.get_rank() + 1)  # shard_convs copies those of the first process
    sharded = build().double()
    if distributed.get_rank() == 0:
        sharded.load_state_dict(plain.state_dict())
    keys = list(sharded.state_dict())
    assert shard_convs(sharded, mesh, plan)
    assert list(sharded.state_dict()) == keys
    assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in sharded.parameters())
    expected = step(plain, x, lambda: nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    results = step(sharded, x, lambda: clip_grad_norm(sharded, 1e-3))
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in sharded.parameters()]
    for a, b in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, **CLOSE)
    gathered = get_model_state_dict(sharded, options=FULL)
    assert list(gathered) == keys
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(gathered[key], value, **CLOSE)
    doubled = {key: value * 2 for key, value in plain.state_dict().items()}
    set_model_state_dict(sharded, dict(doubled), options=FULL)  # it changes the dict
    for key, value in get_model_state_dict(sharded, options=FULL).items():
        torch.testing.assert_close(value, doubled[key], **CLOSE)


def with_muon(mesh):
    """Muon gathers kernels and orthogonalises them in single precision."""
    build, plan, _ = CASES["our U-Net"]
    torch.manual_seed(0)
    plain = build()
    sharded = build()
    sharded.load_state_dict(plain.state_dict())
    shard_convs(sharded, mesh, plan)
    x = torch.randn(2, 2, 8, 8, 8)
    for network in (plain, sharded):
        optimizer = Muon(network.parameters(), lr=0.01)
        network(x).square().mean().backward()
        optimizer.step()
    for key, value in get_model_state_dict(sharded, options=FULL).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=2e-4, msg=key)


def traffic(way, mesh):
    """The formula of `shard_convs`, for even numbers of channels."""
    first, second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 3)
    network = nn.Sequential(nn.Sequential(first, nn.ReLU(), second) if way == "pair" else first)
    shard_convs(network, mesh, {"^0$": way})
    x = torch.randn(2, 4, 9, 9, requires_grad=True)
    with Traffic() as forward:
        y = network(x)
    with Traffic() as backward:
        y.sum().backward()
    parts = {"out": (1, 2), "in": (2, 1), "pair": (2, 2)}[way]
    assert (forward.bytes, backward.bytes) == (parts[0] * y.nbytes / 2, parts[1] * x.nbytes / 2)


class Standardised(nn.Conv2d):
    """Its forward computes another weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


def second_derivative(mesh):
    """It is refused, because it would lack the exchange between processes."""
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh())
    shard_convs(network, mesh, {"0": "out"})
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    (first,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def no_gradients(mesh):
    assert clip_grad_norm(nn.Conv2d(2, 4, 3), 1.0) == 0


def refusals(mesh):
    conv = nn.Conv2d
    for network, plan, words in (
        (
            nn.Sequential(conv(4, 4, 3, groups=2)),
            {"0": "out"},
            "layer 0: .*groups=1 can be divided, this is groups=2",
        ),
        (nn.Sequential(nn.ConvTranspose2d(4, 4, 2)), {"": "in"}, "layer 0: .* this is a transposed one"),
        (
            conv(1, 4, 3),
            {"": "in"},
            "1 input channels cannot be divided over 2 processes, some would get none",
        ),
        (nn.Sequential(conv(4, 4, 3)), {"1": "in"}, "plan: '1' matches no layer for 'in' of Sequential$"),
        (
            nn.Sequential(nn.Sequential(conv(4, 4, 3), conv(4, 4, 3))),
            {"0.0": "pair"},
            "for 'pair' of Sequential; pair is for the nn.Sequential that holds both convolutions$",
        ),
        (nn.Sequential(conv(4, 4, 3)), {"0": "row"}, "plan: '0' must be one of .*, got 'row'"),
        (nn.Sequential(conv(4, 4, 3)), {"": "pair"}, "a pair has two convolutions, this one has 1"),
        (
            nn.Sequential(conv(4, 4, 3), nn.GroupNorm(2, 4), conv(4, 4, 3)),
            {"": "pair"},
            "GroupNorm within a pair may mix channels",
        ),
        (
            nn.Sequential(c := conv(4, 4, 3), c, conv(4, 4, 3)),
            {"0": "in"},
            "layer 0: another layer has the same weights",
        ),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(conv(4, 4, 3))),
            {"0": "in"},
            "layer 0: its weight is computed",
        ),
        (
            nn.Sequential(Standardised(4, 4, 3)),
            {"0": "in"},
            "layer 0: Standardised has a forward of its own, which would be",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            shard_convs(network, mesh, plan)
    half = nn.Sequential(conv(4, 4, 3), conv(4, 1, 3))
    for plan in ({".": "out"}, {"0": "in", "2": "in"}):
        with pytest.raises(ValueError):
            shard_convs(half, mesh, plan)
    assert type(half[0]) is conv and not isinstance(half[0].weight, DTensor)
    with pytest.raises(ValueError, match="layer 0: it is divided already"):
        shard_convs(nn.Sequential(conv(4, 4, 3), conv(4, 4, 3)), mesh, {"^$": "pair", "0": "out"})
    twice = nn.Sequential(conv(4, 4, 3))
    shard_convs(twice, mesh, {"0": "in"})
    with pytest.raises(ValueError, match="layer 0: it is divided already"):
        shard_convs(twice, mesh, {"0": "out"})


TESTS = {
    **{name: lambda mesh, name=name: compare(name, mesh) for name in CASES},
    **{f"bytes of {way}": lambda mesh, way=way: traffic(way, mesh) for way in ("out", "in", "pair")},
    "Muon": with_muon,
    "refusals": refusals,
    "second derivative": second_derivative,
    "no gradients": no_gradients,
}


def _work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    mesh = init_device_mesh("cpu", (2,))
    failed = {}
    for name, test in TESTS.items():
        try:
            test(mesh)
        except BaseException as error:  # pytest has its own kinds
            failed[name] = f"{type(error).__name__}: {error}"
    torch.save(failed, folder / f"failed{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The failed tests of each of two processes, which are started once."""
    folder = tmp_path_factory.mktemp("sharded")
    ranks.call(_work, ranks.port(), folder)
    return [torch.load(folder / f"failed{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", TESTS)
def test_two_processes_give_the_numbers_of_one(failed, name):
    assert [errors.get(name) for errors in failed] == [None, None]


MESH = SimpleNamespace(size=lambda: 3)


def plain_block():
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())


def test_the_first_pattern_whose_way_is_for_the_module_counts():
    network = nn.ModuleDict({"down": plain_block(), "head": nn.Conv2d(6, 6, 1)})
    assert ways_of(network, MESH, {"^down$": "pair", "head": "out"}) == {"down": "pair", "head": "out"}
    assert ways_of(network, MESH, {r"down\.0": "out", "": "in"}) == {
        "down.0": "out",
        "down.3": "in",
        "head": "in",
    }


def test_a_pair_is_two_convolutions_and_the_norms_between():
    layers = plain_block()
    first, norms, second = pair_of(layers)
    assert first is layers[0] and norms == [layers[1]] and second is layers[3]


@pytest.mark.parametrize(("channels", "share"), [(6, 2), (7, 3), (9, 3)])
def test_only_the_last_process_has_fewer_channels(channels, share):
    assert largest_share(channels, MESH) == share
