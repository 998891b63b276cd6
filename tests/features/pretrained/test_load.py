"""medconv/features/pretrained/load.py: what is loaded, the report of the rest, and files that do not fit."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.pretrained import (
    DERIVED,
    UNET_LAYERS,
    assert_refused,
    assert_same,
    our_checkpoint,
    resnet,
    save,
    unet,
    unet_with_basis,
)
from monai.networks.nets import UNet as MonaiUNet
from monai.networks.nets.resnet import ResNet
from torch import nn

from medconv.config import ConfigError
from medconv.convs import basis, se, separable, swap_convs, transform
from medconv.features.pretrained.fit import Layers
from medconv.features.pretrained.load import Report, load


def resnet18(dims, channels, classes):
    """MONAI's, as torchvision builds it."""
    settings = {"num_classes": classes, "bias_downsample": False, "conv1_t_stride": 2}
    return ResNet("basic", [2, 2, 2, 2], [64, 128, 256, 512], dims, channels, **settings)


def test_weights_of_torchvisions_resnet_fit_monais(tmp_path):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(1)
    source = models.resnet18(weights=None).eval()
    path = save(tmp_path / "resnet18.pth", source.state_dict())
    flat = resnet18(2, 3, 1000)
    assert load(flat, path, replace(DERIVED, num_channels=3)).share == 1
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(flat.eval()(image), source(image), rtol=1e-4, atol=1e-4)
    layers = Layers(frozenset({"conv1"}), frozenset({"fc"}))
    report = load(resnet18(3, 1, 2), path, DERIVED, layers, "inflate")
    assert sorted(report.random) == ["fc.bias", "fc.weight"] and report.share == 1
    assert report.reshaped["conv1.weight"].startswith(
        "(64, 3, 7, 7) to (64, 1, 7, 7, 7): 2D to 3D by inflate, axis 2, other"
    )


def test_what_does_not_fit_stays_random_and_is_reported(tmp_path):
    source, network = resnet(classes=10), resnet(classes=2)
    state = dict(source.state_dict())
    del state["layer1.0.conv1.weight"]
    state["extra.weight"] = torch.zeros(3, 3)
    fresh = network.state_dict()["layer1.0.conv1.weight"].clone()
    report = load(
        network,
        save(tmp_path / "file.pth", state),
        replace(DERIVED, num_channels=3),
        Layers(head=frozenset({"fc"})),
    )
    source.fc = network.fc
    assert_same(network, source, ("layer1.0.conv1.weight",))
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


def test_the_error_for_a_wider_network_names_the_kernels_of_other_size(tmp_path):
    path = save(tmp_path / "file.pth", unet(widths=(8, 16)).state_dict())
    with pytest.raises(ValueError) as error:
        load(unet(), path, DERIVED, UNET_LAYERS)
    assert str(error.value) == (
        f"init.pretrained={path}: 9 kernels have names of this network's, but other sizes: "
        "encoder.0.0.weight (8, 1, 3, 3), here (4, 1, 3, 3), encoder.0.3.weight (8, 8, 3, 3), here (4, 4, "
        "3, 3) and 7 more"
    )


def test_a_head_of_other_classes_is_not_loaded_even_if_it_fits(tmp_path):
    source, network = unet(seed=1), unet(seed=2)
    network.head.bias.data.fill_(7.0)
    source.head.bias.data.fill_(8.0)
    content = our_checkpoint(source, replace(DERIVED, targets={"names": ["hole", "box"]}))
    content["state_dict"]["supervision.heads.0.weight"] = torch.zeros(3, 4, 1, 1)
    report = load(network, save(tmp_path / "ours.ckpt", content), DERIVED, UNET_LAYERS)
    assert_same(network, source, ("head.",))
    assert report.random == dict.fromkeys(["head.weight", "head.bias"], "head of other classes")
    assert report.unused["supervision.heads.0.weight"] == "no such name in the network" and report.share == 1


def test_the_error_for_a_file_without_matching_names_lists_both_names(tmp_path):
    path = save(tmp_path / "other.pth", resnet().state_dict())
    with pytest.raises(ValueError) as error:
        load(unet(), path, DERIVED)
    assert str(error.value) == (
        f"init.pretrained={path}: no name in it is one of this network's: it holds conv1.weight (8, 3, 7, "
        "7), layer1.0.conv1.weight (8, 8, 3, 3) and 11 more; the network has encoder.0.0.weight (4, 1, 3, "
        "3), encoder.0.3.weight (4, 4, 3, 3) and 7 more"
    )


def test_another_architecture_with_common_names_is_refused_or_causes_a_warning(tmp_path, caplog):
    other = resnet().state_dict()
    bn1 = {
        name.replace("bn1", "encoder.0.1"): value for name, value in other.items() if name.startswith("bn1")
    }
    norms = {name: value[:4] if value.ndim else value for name, value in bn1.items()}
    with pytest.raises(ValueError, match="no kernel in it is one of this network's: it holds conv1.weight"):
        load(unet(), save(tmp_path / "norms.pth", {**norms, "conv1.weight": other["conv1.weight"]}), DERIVED)
    few = {**norms, "encoder.0.3.weight": unet(seed=1).state_dict()["encoder.0.3.weight"]}
    with caplog.at_level("INFO", logger="medconv"):
        load(unet(), save(tmp_path / "few.pth", few), DERIVED)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(
        r"6 of \d+ tensors loaded; .* randomly initialised .*; \d % of the weights are the file's",
        caplog.text,
    )


def unet_with_separable():
    network = unet()
    swap_convs(network, separable)
    return network


def not_finite():
    state = dict(unet().state_dict())
    state["up.0.weight"] = torch.full_like(state["up.0.weight"], torch.nan)
    return state


REFUSED = {
    "not finite": (unet, not_finite, "up.0.weight in it holds numbers that are not finite"),
    "2D in 3D": (
        partial(resnet, 3, 1),
        lambda: resnet(2, 1).state_dict(),
        r"it is of a 2D network \(conv1.weight \(8, 1, 7, 7\)\), this one is 3D: init.inflate_2d=inflate",
    ),
    "3D in 2D": (
        unet,
        lambda: unet(3).state_dict(),
        "it is of a 3D network .*, this one is 2D; 3D weights are not used in 2D",
    ),
    "plain": (
        unet_with_basis,
        lambda: unet().state_dict(),
        "such as encoder.0.0.weight, .*: conv.init_from_weights=true projects them",
    ),
    "computed": (
        unet,
        lambda: unet_with_basis().state_dict(),
        "encoder.0.0.parametrizations.weight.original.*take the `conv`",
    ),
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_file_for_another_kind_of_network_is_refused(content, tmp_path):
    network, state, words = REFUSED[content]
    assert_refused(network(), save(tmp_path / "file.pth", state()), words)


def test_several_layers_in_the_place_of_one_are_no_plain_kernel(tmp_path):
    plain, chain = unet(), unet_with_separable()
    kernels = frozenset(name for name, value in plain.named_parameters() if value.ndim > 2)
    path = save(tmp_path / "plain.pth", plain.state_dict())
    words = "plain weights, such as encoder.0.0.weight, .* in the place of encoder.0.0: conv.init_from"
    with pytest.raises(ConfigError, match=words):
        load(chain, path, DERIVED, Layers(kernels=kernels))
    content = our_checkpoint(chain, DERIVED)
    content["medconv"]["config"]["conv"] = {"_target_": "medconv.convs.separable"}
    words = r"other weights, such as \S*encoder.0.0.[01].weight, .*take the `conv`"
    with pytest.raises(ConfigError, match=words):
        load(plain, save(tmp_path / "chain.ckpt", content), DERIVED, Layers(kernels=kernels))


def _with(conv):
    return {"_target_": "medconv.convs.basis", "_partial_": True, "where": None, "sigma_mm": None, **conv}


OTHER_PRIORS = {
    "another convolution": ({"_target_": "medconv.convs.spacing"}, r"conv\._target_=medconv\.convs\.spacing"),
    "another key": ({"sigma_mm": 2.0}, r"conv\.sigma_mm=2\.0, here it is None"),
}


@pytest.mark.parametrize("name", OTHER_PRIORS)
def test_weights_of_another_prior_are_refused_although_they_fit(name, tmp_path):
    saved, words = OTHER_PRIORS[name]
    network = unet_with_basis()
    content = our_checkpoint(network, DERIVED)
    content["medconv"]["config"]["conv"] = _with(saved)
    path = save(tmp_path / "other.ckpt", content)
    before = network.state_dict()["encoder.0.0.parametrizations.weight.original"].clone()
    with pytest.raises(ConfigError, match=words):
        load(network, path, DERIVED, conv=_with({}))
    assert torch.equal(network.state_dict()["encoder.0.0.parametrizations.weight.original"], before)


def test_weights_of_the_same_prior_are_loaded_onto_another_grid(tmp_path):
    network = unet_with_basis()
    content = our_checkpoint(network, DERIVED)
    content["medconv"]["config"]["conv"] = _with(
        {"_target_": "medconv.convs.linear.basis", "where": "encoder", "spacing_mm": [1.0, 2.0]}
    )
    own = _with({"spacing_mm": [1.0, 1.0], "init_from_weights": False})
    assert not load(unet_with_basis(), save(tmp_path / "same.ckpt", content), DERIVED, conv=own).random


def test_a_network_with_a_stem_of_several_layers_loads_what_fits(tmp_path):
    """No convolution was swapped: such as a ResNet whose first layer became three."""
    source = nn.ModuleDict({"conv1": nn.Conv2d(1, 4, 3), "layer": nn.Conv2d(4, 4, 3)})
    stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3))
    network = nn.ModuleDict({"conv1": stem, "layer": nn.Conv2d(4, 4, 3)})
    kernels = frozenset(name for name, value in network.named_parameters() if value.ndim > 2)
    path = save(tmp_path / "file.pth", source.state_dict())
    assert sorted(load(network, path, DERIVED, Layers(kernels=kernels)).loaded) == [
        "layer.bias",
        "layer.weight",
    ]
    back = save(tmp_path / "back.pth", network.state_dict())
    kernels = frozenset(name for name, value in source.named_parameters() if value.ndim > 2)
    assert sorted(load(source, back, DERIVED, Layers(kernels=kernels)).loaded) == [
        "layer.bias",
        "layer.weight",
    ]


def test_an_unknown_inflation_is_refused(tmp_path):
    path = save(tmp_path / "file.pth", unet().state_dict())
    with pytest.raises(ConfigError, match=r"init\.inflate_2d must be null or one of inflate, acs, got 3d"):
        load(unet(), path, DERIVED, None, "3d")


def test_the_head_of_monais_u_net_has_several_layers(tmp_path):
    """Between datasets with other labels, two layers stay random."""
    build = partial(MonaiUNet, 2, 1, channels=(4, 8), strides=(2,), num_res_units=1)
    source, network = build(out_channels=3), build(out_channels=2)
    report = load(
        network, save(tmp_path / "file.pt", source.state_dict()), DERIVED, Layers(head=frozenset({"model.2"}))
    )
    assert all(name.startswith("model.2.") for name in report.random) and report.share == 1


def test_a_layer_that_the_file_has_under_another_name_is_loaded(tmp_path):
    """Safetensors hold what two layers share under the name of one of them."""
    network = nn.ModuleDict({name: nn.Conv2d(1, 4, 3, bias=False) for name in ("first", "second", "other")})
    network["second"].weight = network["first"].weight
    kernel = torch.rand(4, 1, 3, 3)
    report = load(network, save(tmp_path / "file.pt", {"second.weight": kernel}), DERIVED)
    assert sorted(report.loaded) == ["first.weight", "second.weight"] and list(report.random) == [
        "other.weight"
    ]
    assert torch.equal(network["first"].weight, kernel) and report.share == pytest.approx(2 / 3)


def test_the_line_names_only_what_there_is():
    assert str(Report(loaded=["a", "b"])) == "2 of 2 tensors loaded"
    report = Report(["a"], {"a": "(2,) to (3,)"}, {"head": "head of other classes"}, {"fc": ""})
    assert str(report) == (
        "1 of 2 tensors loaded, 1 of them reshaped; 1 randomly initialised (head); 1 of the file not used (fc)"
    )


def test_the_table_says_how_many_rows_it_leaves_out():
    report = Report(loaded=[f"layer{i}" for i in range(14)], unused={"fc": "no such name in the network"})
    lines = report.table().splitlines()
    assert lines[0] == "  not used  fc  no such name in the network"
    assert lines[1] == "  loaded    layer0" and len(lines) == 1 + 12 + 1
    assert lines[-1] == "  loaded    and 2 more"


def test_weights_for_other_filters_of_the_same_number_are_refused(tmp_path):
    """Coefficients of one bank make other kernels with another one, whose sizes do not differ."""
    network = unet_with_basis()
    content = our_checkpoint(network, DERIVED)
    content["medconv"]["config"]["conv"] = _with({"bank": ["jet"]})
    path = save(tmp_path / "other.ckpt", content)
    with pytest.raises(ConfigError, match=r"conv\.bank=\['jet'\], here it is \['log', 'lines'\]"):
        load(network, path, DERIVED, conv=_with({"bank": ["log", "lines"]}))
    assert not load(network, path, DERIVED, conv=_with({"bank": ["jet"]})).random


def test_channels_in_another_order_are_taken_by_name(tmp_path):
    source, network = unet(channels=2), unet(channels=2, seed=1)
    content = our_checkpoint(source, replace(DERIVED, num_channels=2))
    content["medconv"]["modalities"] = ["T1", "T2"]
    path = save(tmp_path / "last.ckpt", content)
    derived = replace(DERIVED, num_channels=2, modalities=["t2", "T1"])
    report = load(network, path, derived, UNET_LAYERS)
    (name,) = report.reshaped
    assert name.startswith("encoder.0.0") and "channels by name" in report.reshaped[name]
    image = torch.rand(1, 2, 16, 16)
    torch.testing.assert_close(network(image.flip(1)), source(image))
    # other names say nothing of the order
    assert not load(network, path, replace(derived, modalities=["a", "b"]), UNET_LAYERS).reshaped
    assert_same(network, source)


@pytest.mark.parametrize("convolution", [basis, se, transform])
def test_channels_in_another_order_move_as_a_whole_or_not_at_all(convolution, tmp_path):
    source, network = (unet(channels=4, seed=seed, widths=(32, 64)) for seed in (0, 1))
    for each in (source, network):
        swap_convs(each, convolution)
        each.eval()
    content = our_checkpoint(source, replace(DERIVED, num_channels=4))
    content["medconv"]["modalities"] = ["T1", "T2", "T3", "T4"]
    path = save(tmp_path / "last.ckpt", content)
    derived = replace(DERIVED, num_channels=4, modalities=["T4", "T3", "T2", "T1"])
    if convolution is se:
        with pytest.raises(
            ConfigError, match=r"another order, which encoder\.0\.0\..* cannot follow; list the"
        ):
            load(network, path, derived, UNET_LAYERS)
        return
    load(network, path, derived, UNET_LAYERS)
    image = torch.rand(1, 4, 16, 16)
    torch.testing.assert_close(network(image.flip(1)), source(image))
