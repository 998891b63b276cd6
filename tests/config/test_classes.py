"""medconv/config/classes.py: classes that a `_target_` names."""

from pathlib import Path
from typing import Any

import pytest

from medconv.config import ConfigError
from medconv.config.classes import check_arguments, check_importable


def test_a_module_that_nobody_has_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        check_importable("model._target_", "no_such_module.Net")
    text = str(raised.value)
    assert text.startswith("model._target_=no_such_module.Net: cannot be imported (there is no module ")
    assert text.count("no_such_module") == 2 and "PYTHONPATH" in text and "--config-dir" in text
    with pytest.raises(
        ConfigError, match=r"^model\._target_=torch\.nn\.Nothing: .* \(torch\.nn has no Nothing\)$"
    ):
        check_importable("model._target_", "torch.nn.Nothing")
    assert capsys.readouterr() == ("", "")


def test_a_feature_that_is_not_installed_is_named() -> None:
    expected = (
        r"^conv\._target_=.*: cannot be imported \(this installation lacks medconv\.features\.nothing\)$"
    )
    with pytest.raises(ConfigError, match=expected):
        check_importable("conv._target_", "medconv.features.nothing.layers.Mirror")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_module", r"\(ModuleNotFoundError: No module named 'no_such_module'\)$"),
        ("raise RuntimeError('no licence')", r"\(RuntimeError: no licence\)$"),
    ],
)
def test_what_a_users_module_raises_is_told(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        check_importable("model._target_", "users_module.Net")


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
def test_keys_that_a_class_needs_or_lacks_are_named(arguments: dict[str, Any], expected: str) -> None:
    node = {"_target_": f"{__name__}.optimizer", "_partial_": True, **arguments}
    with pytest.raises(ConfigError, match=expected):
        check_arguments(node, "optimizer", positional=1)
    check_arguments({**node, "lr": 1, "_args_": []}, "optimizer")
    check_arguments({"_target_": None}, "optimizer")
