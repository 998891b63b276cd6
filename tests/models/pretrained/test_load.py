"""medconv/models/pretrained: loading our and others' files: names, sizes, channels, dimensions, errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.networks.nets import DynUNet
from monai.networks.nets import UNet as MonaiUNet
from monai.networks.nets.resnet import ResNet
from torch import Tensor, nn

from medconv.config import ConfigError
from medconv.convs import acs, basis, swap_convs
from medconv.models.pretrained.adapt import Layers, layers_of
from medconv.models.pretrained.load import load
from medconv.models.unet import UNet

FACTS = {"num_channels": 1, "image_targets": None, "targets": {"names": ["box", "hole"]}}
CHANNELS = Layers(image=frozenset({"encoder.0.0"}), head=frozenset({"head"}))


def unet(
    dims: int = 2, channels: int = 1, classes: int = 3, seed: int = 0, widths: tuple[int, ...] = (4, 8)
) -> UNet:
    torch.manual_seed(seed)
    network = UNet(dims, channels, classes, widths, strides=(2,) * (len(widths) - 1))
    for name, buffer in network.named_buffers():  # as after a training
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return network.eval()


def resnet(dims: int = 2, channels: int = 3, classes: int = 10, **more: Any) -> ResNet:
    """MONAI's, with the names and sizes that torchvision's has."""
    settings = {"conv1_t_size": 7, "conv1_t_stride": 2, "bias_downsample": False, **more}
    widths = [8, 16, 24, 32]
    return ResNet("basic", [1, 1, 1, 1], widths, dims, channels, num_classes=classes, **settings).eval()


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def same(one: nn.Module, other: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Every tensor but those whose name begins so, which all differ."""
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]) == (not name.startswith(but or ("no such name",))), name


def nested(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """A mapping for each module."""
    tree: dict[str, Any] = {}
    for name, value in state.items():
        *parts, last = name.split(".")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "DataParallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
    "Lightning": lambda state: {
        "epoch": 3,
        "loops": {},
        "state_dict": {f"model.net.{name}": value for name, value in state.items()},
        "optimizer_states": [{"state": {0: {"mean": torch.zeros(3)}}}],
    },
    "MONAI, with an optimizer": lambda state: {
        "optimizer": {"state": {0: {"m": torch.ones(2)}}},
        "model": state,
    },
    "a name of its own": lambda state: {"net_g_weights": {"wrapped": state}},
    "mappings of mappings": nested,
    "beside a wider teacher": lambda state: {"teacher": unet(widths=(6, 8)).state_dict(), "student": state},
    "first of two": lambda state: {"model": state, "ema": {name: value + 1 for name, value in state.items()}},
}


@pytest.mark.parametrize("how", WRAPPINGS)
def test_names_are_found_however_they_are_wrapped(how: str, tmp_path: Path) -> None:
    source, network = unet(seed=1), unet(seed=2)
    report = load(network, save(tmp_path / "file.pth", WRAPPINGS[how](dict(source.state_dict()))), FACTS)
    same(network, source)
    assert report.share == 1 and not report.random and not report.reshaped


class Wrapped(nn.Module):
    """A larger network around one that has names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.classifier = unet(seed=5), nn.Linear(3, 2)


def test_the_encoder_of_a_larger_network(tmp_path: Path) -> None:
    source, network = unet(seed=1), Wrapped()
    before = network.classifier.weight.detach().clone()
    report = load(network, save(tmp_path / "file.pt", {"module": source.state_dict()}), FACTS)
    same(network.backbone, source)
    assert torch.equal(network.classifier.weight, before)
    assert list(report.random) == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize("file", ["file.safetensors", "file.pth"])
@pytest.mark.parametrize("build", [resnet, lambda: DynUNet(2, 3, 2, [3] * 3, [1, 2, 2], [2, 2], [4, 8, 8])])
def test_monais_networks_from_their_own_files(
    build: Callable[[], nn.Module], file: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    source, network = build(), build()
    state = {name: value.clone() for name, value in source.state_dict().items()}
    if file.endswith("safetensors"):
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / file)
    else:
        torch.save(state, tmp_path / file)
    report = load(network, tmp_path / file, {**FACTS, "num_channels": 3})
    same(network, source)
    assert not report.random and not report.unused


def test_torchvisions_resnet_in_monais(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(1)
    source = models.resnet18(weights=None).eval()
    path = save(tmp_path / "resnet18.pth", source.state_dict())
    flat = ResNet(
        "basic",
        [2, 2, 2, 2],
        [64, 128, 256, 512],
        2,
        3,
        num_classes=1000,
        bias_downsample=False,
        conv1_t_stride=2,
    )
    assert load(flat, path, {**FACTS, "num_channels": 3}).share == 1
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(flat.eval()(image), source(image), rtol=1e-4, atol=1e-4)
    report = load(
        resnet_like(source), path, FACTS, Layers(frozenset({"conv1"}), frozenset({"fc"})), "inflate"
    )
    assert sorted(report.random) == ["fc.bias", "fc.weight"] and report.share == 1
    assert report.reshaped["conv1.weight"].startswith(
        "(64, 3, 7, 7) to (64, 1, 7, 7, 7): 2D to 3D by inflate, axis 2, other"
    )


def resnet_like(source: nn.Module) -> ResNet:
    widths = [64, 128, 256, 512]
    return ResNet("basic", [2, 2, 2, 2], widths, 3, 1, num_classes=2, bias_downsample=False, conv1_t_stride=2)


def test_what_does_not_fit_is_said_and_stays_as_drawn(tmp_path: Path) -> None:
    source, network = resnet(classes=10), resnet(classes=2)
    state = dict(source.state_dict())
    del state["layer1.0.conv1.weight"]
    state["extra.weight"] = torch.zeros(3, 3)
    fresh = network.state_dict()["layer1.0.conv1.weight"].clone()
    report = load(
        network,
        save(tmp_path / "file.pth", state),
        {**FACTS, "num_channels": 3},
        Layers(head=frozenset({"fc"})),
    )
    same(network, source_with_head(source, network), ("layer1.0.conv1.weight",))
    assert torch.equal(network.state_dict()["layer1.0.conv1.weight"], fresh)
    sizes = "(10, 32) in the file, here (2, 32)"
    assert report.random == {
        "layer1.0.conv1.weight": "no such name in the file",
        "fc.weight": sizes,
        "fc.bias": "(10,) in the file, here (2,)",
    }
    assert report.unused == {
        "fc.weight": sizes,
        "fc.bias": report.random["fc.bias"],
        "extra.weight": "no such name in the network",
    }
    assert 0.5 < report.share < 1
    line = str(report)
    assert "3 randomly initialised (layer1.0.conv1.weight, fc.weight, fc.bias)" in line
    assert "3 of the file not used (fc.weight, fc.bias, extra.weight)" in line
    assert (
        f"  not used  fc.weight  {sizes}\n" in report.table()
        and "  loaded    conv1.weight\n" in report.table()
    )


def source_with_head(source: nn.Module, network: nn.Module) -> nn.Module:
    source.fc = network.fc
    return source


@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("conv", ["plain", "basis"])
def test_an_image_whose_channels_are_alike_gets_the_same_response(
    old: int, new: int, conv: str, tmp_path: Path
) -> None:
    source, network = unet(channels=old, seed=1), unet(channels=new, seed=2)
    if conv == "basis":
        for one in (source, network):
            swap_convs(one, basis)
    content = {
        "medconv": {"config": {"derived": FACTS}},
        "state_dict": {f"network.{k}": v for k, v in source.state_dict().items()},
    }
    report = load(network, save(tmp_path / "ours.ckpt", content), {**FACTS, "num_channels": new}, CHANNELS)
    assert len(report.reshaped) == 1 and not report.random
    image = torch.rand(1, 1, 16, 16)
    with torch.no_grad():
        ours, theirs = network(image.expand(-1, new, -1, -1)), source(image.expand(-1, old, -1, -1))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_only_layers_that_see_the_image_change_their_inputs(tmp_path: Path) -> None:
    """A layer elsewhere may have as many inputs as the image has channels."""
    report = load(
        unet(widths=(1, 8)), save(tmp_path / "file.pth", unet(seed=1).state_dict()), FACTS, CHANNELS
    )
    assert (
        report.random["down.0.weight"] == "(8, 4, 2, 2) in the file, here (8, 1, 2, 2)"
        and not report.reshaped
    )


def test_a_wider_network_of_the_same_kind_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "file.pth", unet(widths=(8, 16)).state_dict())
    with pytest.raises(ValueError) as error:
        load(unet(), path, FACTS, CHANNELS)
    assert str(error.value) == (
        f"init.pretrained={path}: 9 kernels have names of this network's, but other sizes: "
        "encoder.0.0.weight (8, 1, 3, 3), here (4, 1, 3, 3), encoder.0.3.weight (8, 8, 3, 3), here (4, 4, "
        "3, 3) and 7 more"
    )


@pytest.mark.parametrize("file_axis", [None, 0, 1, 2])
def test_inflated_weights_give_what_the_2d_network_gives(file_axis: int | None, tmp_path: Path) -> None:
    """For an image that is constant along the new axis, far from its borders."""
    flat, solid = unet(2, seed=1), unet(3, seed=2)
    derived = {**FACTS, "slice_axis": file_axis}
    content = {
        "medconv": {"config": {"derived": derived}},
        "state_dict": {f"network.{k}": v for k, v in flat.state_dict().items()},
    }
    report = load(solid, save(tmp_path / "ours.ckpt", content), FACTS, CHANNELS, "inflate")
    assert not report.random and all("2D to 3D by inflate" in words for words in report.reshaped.values())
    axis = 2 if file_axis is None else file_axis
    image = torch.rand(1, 1, 16, 16)
    with torch.no_grad():
        expected = flat(image)
        found = solid(image.unsqueeze(2 + axis).repeat_interleave(40, 2 + axis)).select(2 + axis, 20)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_new_axis_is_the_one_that_fits(tmp_path: Path) -> None:
    flat = unet(2, seed=1)
    solid = UNet(3, 1, 3, (4, 8), strides=[(1, 2, 2)], kernel_size=[(1, 3, 3), (3, 3, 3)])
    report = load(solid, save(tmp_path / "flat.pth", flat.state_dict()), FACTS, None, "inflate")
    assert not report.random and all("axis 0" in words for words in report.reshaped.values())
    assert torch.equal(solid.encoder[0][0].weight[:, :, 0], flat.encoder[0][0].weight)


def test_planes_are_2d_weights_as_they_are_and_acs_keeps_them(tmp_path: Path) -> None:
    flat, solid = unet(2, seed=1, widths=(6, 9)), unet(3, seed=2, widths=(6, 9))
    load(solid, save(tmp_path / "flat.pth", flat.state_dict()), FACTS, None, "acs")
    dense, planes = solid.encoder[0][3].weight.detach(), flat.encoder[0][3].weight.detach()
    for third, axis in zip(dense.split(2), (4, 3, 2), strict=True):  # axial, coronal, sagittal
        assert third.select(axis, 0).abs().max() == 0 and third.select(axis, 2).abs().max() == 0
    assert torch.equal(dense[:2, ..., 1], planes[:2]) and torch.equal(dense[4:, :, 1], planes[4:])
    image = torch.rand(1, 1, 8, 8, 8)
    with torch.no_grad():
        before = solid(image)
        report = swap_convs(solid, partial(acs, init_from_weights=True))
        torch.testing.assert_close(solid(image), before)
    assert max(report.errors.values()) < 1e-6


def test_a_head_of_other_classes_is_not_taken_even_if_it_fits(tmp_path: Path) -> None:
    source, network = unet(seed=1), unet(seed=2)
    content = {
        "medconv": {"config": {"derived": {**FACTS, "targets": {"names": ["hole", "box"]}}}},
        "state_dict": {
            **{f"network.{name}": value for name, value in source.state_dict().items()},
            "supervision.heads.0.weight": torch.zeros(3, 4, 1, 1),
        },
    }
    network.head.bias.data.fill_(7.0)
    source.head.bias.data.fill_(8.0)
    report = load(network, save(tmp_path / "ours.ckpt", content), FACTS, CHANNELS)
    same(network, source, ("head.",))
    assert report.random == dict.fromkeys(["head.weight", "head.bias"], "head of other classes")
    assert report.unused["supervision.heads.0.weight"] == "no such name in the network" and report.share == 1


def node(target: str, **more: Any) -> dict[str, Any]:
    return {"_target_": target, "spatial_dims": 2, "in_channels": 1, "out_channels": 2, **more}


NODES = {
    "ours": (
        node("medconv.models.UNet", channels=[4, 8], strides=[2]),
        {"encoder.0.0"},
        {"head"},
    ),
    "MONAI's U-Net": (
        node("monai.networks.nets.UNet", channels=[4, 8], strides=[2], num_res_units=1),
        {"model.0.conv.unit0.conv", "model.0.residual"},
        {"model.2.0.conv", "model.2.1.conv.unit0.conv"},
    ),
    "DynUNet": (
        node(
            "monai.networks.nets.DynUNet",
            kernel_size=[3, 3, 3],
            strides=[1, 2, 2],
            upsample_kernel_size=[2, 2],
            filters=[4, 8, 8],
        ),
        {"input_block.conv1.conv", "skip_layers.downsample.conv1.conv"},
        {"output_block.conv.conv"},
    ),
    "SegResNet": (
        node("monai.networks.nets.SegResNet", init_filters=8),
        {"convInit.conv"},
        {"conv_final.2.conv"},
    ),
}


@pytest.mark.parametrize("which", NODES)
def test_layers_whose_size_the_dataset_decides(which: str) -> None:
    """Found by building the network for one channel, and one output, more; without names or types."""
    model, image, head = NODES[which]
    state = torch.get_rng_state()
    found = layers_of(model, {**model, "in_channels": 2}, {**model, "out_channels": 3})
    assert torch.equal(torch.get_rng_state(), state)
    assert found.image == image and found.head == head
    assert layers_of(model, {**model, "in_channels": "two"}, model) == Layers()


def test_files_that_fit_nothing_say_what_they_hold(tmp_path: Path) -> None:
    path = save(tmp_path / "other.pth", resnet().state_dict())
    with pytest.raises(ValueError) as error:
        load(unet(), path, FACTS)
    assert str(error.value) == (
        f"init.pretrained={path}: no name in it is one of this network's: it holds conv1.weight (8, 3, 7, "
        "7), layer1.0.conv1.weight (8, 8, 3, 3) and 11 more; the network has encoder.0.0.weight (4, 1, 3, "
        "3), encoder.0.3.weight (4, 4, 3, 3) and 7 more"
    )


def test_another_architecture_with_names_in_common_is_refused_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = resnet().state_dict()
    bn1 = {
        name.replace("bn1", "encoder.0.1"): value for name, value in other.items() if name.startswith("bn1")
    }
    norms = {name: value[:4] if value.ndim else value for name, value in bn1.items()}
    with pytest.raises(ValueError, match="no kernel in it is one of this network's: it holds conv1.weight"):
        load(unet(), save(tmp_path / "norms.pth", {**norms, "conv1.weight": other["conv1.weight"]}), FACTS)
    some = {**norms, "encoder.0.3.weight": unet(seed=1).state_dict()["encoder.0.3.weight"]}
    with caplog.at_level("INFO", logger="medconv"):
        load(unet(), save(tmp_path / "some.pth", some), FACTS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(
        r"6 of \d+ tensors loaded; .* randomly initialised .*; \d % of the weights are the file's",
        caplog.text,
    )


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def not_finite() -> dict[str, Tensor]:
    state = dict(unet().state_dict())
    state["up.0.weight"] = torch.full_like(state["up.0.weight"], torch.nan)
    return state


def looping() -> dict[str, Any]:
    content: dict[str, Any] = {"epoch": 1}
    content["again"] = content
    return content


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "payload": (
        lambda path: {**unet().state_dict(), "more": Payload(path / "hit")},
        "refused, it holds more than tensors",
    ),
    "a whole module": (lambda path: unet(), "refused, it holds more than tensors"),
    "a list": (lambda path: [torch.zeros(2)], "holds a list, expected tensors by name"),
    "no tensors": (lambda path: looping(), "holds no tensors by name"),
    "not finite": (lambda path: not_finite(), "up.0.weight in it holds numbers that are not finite"),
    "2D in 3D": (
        lambda path: resnet(2, 1).state_dict(),
        r"it is of a 2D network \(conv1.weight \(8, 1, 7, 7\)\), this one is 3D: init.inflate_2d=inflate",
    ),
    "3D in 2D": (
        lambda path: unet(3).state_dict(),
        "it is of a 3D network .*, this one is 2D; 3D weights are not used in 2D",
    ),
    "plain": (
        lambda path: unet().state_dict(),
        "such as encoder.0.0.weight, .*: conv.init_from_weights=true projects them",
    ),
    "computed": (
        lambda path: with_basis().state_dict(),
        "encoder.0.0.parametrizations.weight.original .*take the `conv`",
    ),
}


def with_basis() -> nn.Module:
    network = unet()
    swap_convs(network, basis)
    return network


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    make, words = REFUSED[what]
    network = {"2D in 3D": partial(resnet, 3, 1), "plain": with_basis}.get(what, unet)()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    path = save(tmp_path / "file.pth", make(tmp_path))
    with pytest.raises(ValueError, match=words) as error:
        load(network, path, FACTS)
    assert str(path) in str(error.value) and not (tmp_path / "hit").exists()
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.pth", unet().state_dict()).read_bytes()
    (tmp_path / "half.pth").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pth").write_text("no weights")
    (tmp_path / "text.safetensors").write_text("no weights, either, in this file")
    for name, words in {
        "half.pth": "damaged or not a checkpoint",
        "text.pth": "refused, it holds more than tensors and plain values, or is no checkpoint",
        "none.pth": "no such checkpoint",
        "text.safetensors": "damaged or not a safetensors file|needs the package safetensors: pip install",
        "none.safetensors": "no such checkpoint|needs the package safetensors: pip install",
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: ({words})"):
            load(unet(), tmp_path / name, FACTS)
    with pytest.raises(ConfigError, match=r"init\.inflate_2d must be null or one of inflate, acs, got 3d"):
        load(unet(), tmp_path / "whole.pth", FACTS, None, "3d")


def test_a_half_precision_file_of_older_torch(tmp_path: Path) -> None:
    """Not an archive, and without the counters of its norms."""
    source, network = unet(seed=1), unet(seed=2)
    state = {k: v.half() for k, v in source.state_dict().items() if "num_batches" not in k}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    report = load(network, tmp_path / "old.pth", FACTS)
    assert not report.random and network.head.weight.dtype == torch.float32
    torch.testing.assert_close(network.head.weight, source.head.weight, rtol=1e-3, atol=1e-3)


def test_monais_u_net_between_labels(tmp_path: Path) -> None:
    """Two layers of it make the outputs."""
    build = partial(MonaiUNet, 2, 1, channels=(4, 8), strides=(2,), num_res_units=1)
    source, network = build(out_channels=3), build(out_channels=2)
    report = load(
        network, save(tmp_path / "file.pt", source.state_dict()), FACTS, Layers(head=frozenset({"model.2"}))
    )
    assert all(name.startswith("model.2.") for name in report.random) and report.share == 1
