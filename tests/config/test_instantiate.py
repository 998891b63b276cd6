"""medconv/config/instantiate.py: objects from nodes; errors name the key."""

from typing import Any

import pytest
from torch import nn

from medconv.config import ConfigError, arguments_as_keys, build, errors_with_key, iter_nodes
from medconv.config.instantiate import check_arguments, check_classes
from medconv.utils.errors import Argument, ArgumentError


def test_a_node_becomes_its_object():
    layer = build({"_target_": "torch.nn.Linear", "in_features": 2}, "model", out_features=3)
    assert isinstance(layer, nn.Linear) and layer.out_features == 3


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"_target_": "torch.nn.Nothing"}, r"^model: torch\.nn\.Nothing cannot be built: "),
        (
            {"_target_": "medconv.convs.parametrization"},
            r"^model: .*: it is a module; export its parametrization in the",
        ),
        ({"_target_": "torch.nn.Linear", "size": 2}, r"^model: torch\.nn\.Linear cannot be built: .*size"),
        ({"_target_": "statistics.mean", "_args_": [[]]}, r"^model: mean requires at least one data point$"),
    ],
)
def test_errors_name_the_key(node, expected):
    with pytest.raises(ConfigError, match=expected):
        build(node, "model")


def test_errors_of_a_later_call_name_the_key_and_the_arguments():
    sgd = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": -1}, "optimizer")
    with pytest.raises(ConfigError, match=r"^optimizer: .*\(given lr=-1\)$"):
        errors_with_key("optimizer", sgd)([nn.Parameter()])


def test_nested_nodes_are_listed_with_their_keys():
    part = {"_target_": "c.D"}
    node = {"_target_": "a.B", "parts": [part]}
    assert list(iter_nodes(node, "model")) == [("model", node), ("model.parts[0]", part)]


def refuse(width: int = 4, name: str | None = None) -> None:
    """A class of a user's own: its message happens to begin with the name of the group."""
    raise ValueError(f"models of width {width} do not exist")


class NoTextError(ValueError):
    """An error that takes no arguments."""

    def __init__(self) -> None: ...


def refuse_without_text(root: int, target: int, config: int) -> None:
    """With arguments of names that are those of Hydra's own functions, too."""
    raise NoTextError


def refuse_by_key() -> None:
    raise ConfigError("data.root=nowhere: no such folder")


def test_only_an_error_of_the_config_names_its_key_itself():
    with pytest.raises(ConfigError, match=r"^model: models of width 0 do not exist$"):
        build({"_target_": f"{__name__}.refuse", "width": 0}, "model")
    node = {"_target_": f"{__name__}.refuse_without_text", "root": 1, "target": 2, "config": 3}
    with pytest.raises(ConfigError, match=r"^model: NoTextError$"):
        build(node, "model")
    with pytest.raises(ConfigError, match=r"^data\.root=nowhere: no such folder$"):
        build({"_target_": f"{__name__}.refuse_by_key"}, "data.layout")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"width": "wide"}, r"^model\.inner\.width must be a whole number, got wide$"),
        ({"width": 2.5}, r"^model\.inner\.width must be a whole number, got 2\.5$"),
        ({"name": True}, r"^model\.inner\.name must be a word or null, got true$"),
    ],
)
def test_arguments_of_a_class_of_the_users_own_are_checked(arguments, expected):
    node = {"_target_": "torch.nn.Identity", "inner": {"_target_": f"{__name__}.refuse", **arguments}}
    with pytest.raises(ConfigError, match=expected):
        check_classes(node, "model")


def implicit(p: float = None, mode: "Undefined" = "a") -> None:  # noqa: F821, RUF013
    """As in libraries: null by default beside another annotation, and a name for type checkers alone."""


@pytest.mark.parametrize(
    "arguments", [{"p": None}, {"p": 1}, {"mode": 3}, {"p": "${derived.share}"}, {"p": "???"}, {"other": 1}]
)
def test_what_annotations_do_not_tell_is_left_to_the_class(arguments):
    check_classes({"_target_": f"{__name__}.implicit", **arguments}, "model")
    check_classes({"_target_": None, "p": 1}, "early_stopping")


def test_a_module_that_nobody_has_is_named_once(capsys):
    with pytest.raises(ConfigError) as raised:
        check_classes({"_target_": "no_such_module.Net"}, "model")
    text = str(raised.value)
    assert text.startswith("model._target_=no_such_module.Net: cannot be imported (there is no module ")
    assert text.count("no_such_module") == 2 and "PYTHONPATH" in text and "--config-dir" in text
    with pytest.raises(
        ConfigError, match=r"^model\._target_=torch\.nn\.Nothing: .* \(torch\.nn has no Nothing\)$"
    ):
        check_classes({"_target_": "torch.nn.Nothing"}, "model")
    assert capsys.readouterr() == ("", "")


def test_a_feature_that_is_not_installed_is_named():
    expected = (
        r"^conv\._target_=.*: cannot be imported \(this installation lacks medconv\.features\.nothing\)$"
    )
    with pytest.raises(ConfigError, match=expected):
        check_classes({"_target_": "medconv.features.nothing.layers.Mirror"}, "conv")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_module", r"\(ModuleNotFoundError: No module named 'no_such_module'\)$"),
        ("raise RuntimeError('no licence')", r"\(RuntimeError: no licence\)$"),
    ],
)
def test_what_a_users_module_raises_is_told(source, expected, tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        check_classes({"_target_": "users_module.Net"}, "model")


def optimizer(params: Any, lr: float, *, momentum: float = 0) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, r"^optimizer\.lr is missing: .*optimizer needs it; \+\+optimizer\.lr=\.\.\. sets it$"),
        (
            {"lr": 1, "momentun": 0.9},
            r"^there is no key optimizer\.momentun: .*; did you mean optimizer\.momentum\?$",
        ),
        ({"lr": 1, "x": 0.9}, r"^there is no key optimizer\.x: .*; it takes params, lr, momentum$"),
    ],
)
def test_keys_that_a_class_needs_or_lacks_are_named(arguments, expected):
    node = {"_target_": f"{__name__}.optimizer", "_partial_": True, **arguments}
    with pytest.raises(ConfigError, match=expected):
        check_arguments(node, "optimizer", positional=1)
    check_arguments({**node, "lr": 1, "_args_": []}, "optimizer")
    check_arguments({"_target_": None}, "optimizer")


@arguments_as_keys("data", "plan", divisible_by="model.divisible_by")
def fail(argument: str, *problem: str) -> None:
    raise ArgumentError(argument, *problem)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (["num_workers", "=-1"], "data.num_workers=-1"),
        (["max_stages", " is 0"], "plan.max_stages is 0"),
        (["divisible_by", "=x"], "model.divisible_by=x"),
        (["images.t1", ": no file"], "data.images.t1: no file"),
        (["fold", " needs ", Argument("num_folds"), ", fold"], "data.fold needs data.num_folds, fold"),
    ],
)
def test_keys_take_the_place_of_arguments(problem, message):
    with pytest.raises(ConfigError) as raised:
        fail(*problem)
    assert str(raised.value) == message


def test_an_argument_without_a_key_keeps_its_error():
    with pytest.raises(ArgumentError, match=r"^overlap=1$"):
        fail("overlap", "=1")
