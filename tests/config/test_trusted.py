"""What comes with a file runs no code: no loader unpickles objects, no command takes a payload, no config
names code.
"""

import ast
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny

import medconv
from medconv.cli.main import commands
from medconv.config import ConfigError, trusted
from medconv.inference.load import load
from medconv.utils.exit_codes import USER

SOURCES = sorted(
    [*(tiny.ROOT / "medconv").rglob("*.py"), *(tiny.ROOT / "scripts").rglob("*.py"), tiny.ROOT / "train.py"]
)
# Each of them creates objects or runs code from a file.
NEVER = {
    "eval",
    "exec",
    "compile",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "marshal.loads",
    "dill.load",
}
NEVER |= {
    "joblib.load",
    "pandas.read_pickle",
    "pd.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
NEVER |= {
    "torch.hub.load",
    "torch.jit.load",
    "torch.export.load",
    "torch.package.PackageImporter",
    "shelve.open",
    "cloudpickle.load",
}
OWN = {
    "medconv/features/export/formats.py": ["torch.jit.load(file", "torch.export.load(file"]
}  # which it has just written


def calls(source):
    """Every call in a text: dotted name, keywords with plain values, line."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    plain = [
        {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
        for node in nodes
    ]
    return [(ast.unparse(node.func), known, node.lineno) for node, known in zip(nodes, plain, strict=True)]


def unsafe(source):
    """Lines that may unpickle objects."""
    lines = []
    for name, keywords, line in calls(source):
        loads = name.endswith(("torch.load", ".load_from_checkpoint", "trainer.fit"))
        wrong = (
            name in NEVER
            or (loads and keywords.get("weights_only") is not True)
            or keywords.get("allow_pickle") is True
        )
        lines += [line] if wrong else []
    return lines


def test_no_source_file_unpickles_objects():
    """But those of peers, which read what they wrote themselves."""
    found = {}
    for path in SOURCES:
        name = str(path.relative_to(tiny.ROOT))
        source = path.read_text()
        for call in OWN.get(name, []):
            assert source.count(call) == 1
            source = source.replace(call, call.replace("torch.", "own."))
        if "benchmarks/peers" not in name:
            found[name] = unsafe(source)
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        *(
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "np.load(path, allow_pickle=True)",
            "eval(text)",
        ),
        *(
            "pickle.load(file)",
            "yaml.load(file, Loader=yaml.Loader)",
            "torch.export.load(path)",
            "trainer.fit(task, data, ckpt_path=path)",
        ),
    ],
)
def test_unsafe_loads_are_detected(source):
    assert unsafe(source) == [1]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "done"
    tiny.train(dataset, folder, "trainer.max_steps=2")
    return folder


@pytest.fixture
def payload(trained, tmp_path):
    """A valid checkpoint, except for an object in the state of the optimizer."""
    content = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    content["optimizer_states"][0]["more"] = Payload(tmp_path / "hit")
    torch.save(content, tmp_path / "bad.ckpt")
    return tmp_path / "bad.ckpt"


def refused(command, arguments, monkeypatch, capsys, hit):
    monkeypatch.chdir(hit.parent)
    code = tiny.call(monkeypatch, command, *arguments)
    error = capsys.readouterr().err
    assert code == USER, error
    assert "Traceback" not in error and error.count("error:") == 1, error
    assert not hit.exists()
    return error


def arguments_of(command, payload, trained, dataset):
    own = payload.parent / "own"
    if command in ("resume=auto", "find-postprocessing"):
        shutil.copytree(trained, own / "fold0")
        for name in ("best", "last"):
            shutil.copy(payload, own / "fold0/checkpoints" / f"{name}.ckpt")
    if command == "find-postprocessing":
        for fold in (1, 2):
            tiny.train(dataset, own / f"fold{fold}", "trainer.max_steps=2", f"data.fold={fold}")
    train = [*tiny.overrides(dataset, "trainer.max_steps=2")]
    return {
        "resume=PATH": [*train, f"run.resume={payload}", f"run.dir={own}"],
        "resume=auto": [*train, "trainer.max_steps=4", f"run.dir={own / 'fold0'}"],
        "pretrained": [*train, f"init.pretrained={payload}", f"run.dir={own}"],
        "predict": ["--checkpoint", str(payload), "--input", str(dataset / "imagesTr"), "--output", str(own)],
        "find-postprocessing": ["--runs", str(own)],
    }[command]


@pytest.mark.parametrize(
    "command", ["resume=PATH", "resume=auto", "pretrained", "predict", "find-postprocessing"]
)
def test_a_payload_is_refused_by_every_command(command, payload, trained, dataset, monkeypatch, capsys):
    arguments = arguments_of(command, payload, trained, dataset)
    error = refused(
        command if command in commands() else "train", arguments, monkeypatch, capsys, payload.parent / "hit"
    )
    assert ".ckpt" in error, error


def test_the_payload_runs_if_it_is_unpickled(payload):
    torch.load(payload, weights_only=False)
    assert (payload.parent / "hit").is_dir()


def shared(depth):
    """Ten lists at each depth, which are one."""
    values = [1]
    for _ in range(depth):
        values = [values] * 10
    return values


NODES = {
    "a function": {"_target_": "os.system", "command": "touch HIT"},
    "a function through an imported module": {
        "_target_": "torch.nn.parallel.distributed.os.system",
        "command": "touch HIT",
    },
    "the same of our own": {"_target_": "medconv.data.loading.datamodule.os.mkdir", "path": "HIT"},
    "a function of the standard library": {"_target_": "subprocess.run", "args": ["touch", "HIT"]},
    "a builtin": {"_target_": "torch.nn.Module.__builtins__.exec"},
    "globals": {"_target_": "torch.nn.functional.conv2d.__globals__"},
    "a class of another module": {"_target_": "medconv.convs.swap.Path", "a": "HIT"},
    "a class re-exported": {"_target_": "torch.nn.modules.module.OrderedDict"},
    "a class re-exported by our convolutions": {"_target_": "medconv.convs.parametrization.Tensor"},
    "a network defined elsewhere": {"_target_": "medconv.training.tasks.segmentation.LightningModule"},
    "a class that is no network": {"_target_": "medconv.training.run_dir.RunDir", "path": "HIT"},
    "a Trainer": {"_target_": "medconv.training.run.L.Trainer"},
    "a function of ours": {"_target_": "medconv.utils.atomic_io.write_text", "path": "HIT", "text": ""},
    "a method": {"_target_": "torch.nn.Module.load_state_dict"},
    "hub": {"_target_": "torch.hub.load", "repo_or_dir": "a/b", "model": "c"},
    "a loader": {"_target_": "torch.nn.modules.module.torch.load", "f": "HIT"},
    "a partial": {"_target_": "functools.partial", "_args_": ["os.mkdir", "HIT"]},
    "made partial": {"_target_": "os.mkdir", "_partial_": True, "path": "HIT"},
    "nothing": {"_target_": "torch.nn.NoSuchThing"},
    "no name": {"_target_": "torch.nn."},
    "a list": {"_target_": ["os", "mkdir"]},
    "a number": {"_target_": 3},
    "null": {"_target_": None},
    "nested": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "os.mkdir", "path": "HIT"}]},
    "nested deeper": {
        "_target_": "torch.nn.Identity",
        "a": [[{"b": {"_target_": "os.mkdir", "path": "HIT"}}]],
    },
    "made of text": {"_target_": "torch.nn.Identity", "a": "${oc.create:{_target_: os.mkdir, path: HIT}}"},
    "made of text in a list": {
        "_target_": "torch.nn.Identity",
        "a": ["${oc.create:{_target_: os.mkdir, path: HIT}}"],
    },
    "a target of text": {"_target_": "${b}", "b": "os.mkdir", "path": "HIT"},
    "the environment": {"_target_": "torch.nn.Identity", "a": "${oc.env:HOME}"},
    "an address": {"_target_": "monai.networks.nets.HoVerNet", "pretrained_url": "http://127.0.0.1:9/a"},
    "an address by its place": {
        "_target_": "monai.networks.nets.HoVerNet",
        "_args_": ["fast", 3, 0, 2, "relu", "batch", False, 0.0, "http://127.0.0.1:9/a"],
    },
    "weights that are fetched": {
        "_target_": "monai.networks.nets.EfficientNetBN",
        "model_name": "efficientnet-b0",
        "pretrained": True,
        "spatial_dims": 2,
    },
    "the same by default": {
        "_target_": "monai.networks.nets.EfficientNetBN",
        "model_name": "efficientnet-b0",
    },
    "the same by a number": {
        "_target_": "monai.networks.nets.DenseNet121",
        "spatial_dims": 2,
        "in_channels": 3,
        "out_channels": 2,
        "pretrained": 1,
    },
    "a file by default": {"_target_": "monai.networks.nets.CellSamWrapper"},
    "20,000 layers": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU"}] * 20_000},
    "a billion values": {"_target_": "torch.nn.Identity", "a": shared(9)},
    "a repository": {"_target_": "monai.networks.nets.Transchex", "path_or_repo_id": "a/b"},
    "a loss that imports what a folder holds": {
        "_target_": "monai.losses.PerceptualLoss",
        "cache_dir": "HIT",
    },
    "a file": {"_target_": "monai.networks.nets.CellSamWrapper", "checkpoint": "HIT"},
}


def placed(node, hit):
    if isinstance(node, dict):
        return {key: placed(value, hit) for key, value in node.items()}
    if isinstance(node, list):
        return [placed(value, hit) for value in node]
    return node.replace("HIT", str(hit)) if isinstance(node, str) else node


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a file must not reach the network")

    for method in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, method, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", NODES)
def test_a_node_from_a_file_cannot_choose_code(name, tmp_path, capsys, no_network):
    node = NODES[name] if name == "a billion values" else placed(NODES[name], tmp_path / "hit")
    with pytest.raises(ConfigError, match=r"^model.* is refused: [^\n]+$"):
        trusted.build_trusted(node, "model")
    assert not (tmp_path / "hit").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("group", ["model", "conv"])
@pytest.mark.parametrize("name", ["a function through an imported module", "nested", "made of text"])
def test_a_checkpoint_that_names_code_is_refused(trained, tmp_path, group, name):
    content = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    content["medconv"]["config"][group] = placed(NODES[name], tmp_path / "hit")
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="is refused"):
        load(tmp_path / "x.ckpt")
    assert not (tmp_path / "hit").exists()


def test_networks_and_trusted_packages_are_built():
    assert isinstance(trusted.build_trusted({"_target_": "torch.nn.Identity"}, "model"), torch.nn.Identity)
    nested = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU"}]}
    assert isinstance(trusted.build_trusted(nested, "model")[0], torch.nn.ReLU)
    loss = {"_target_": "monai.losses.DiceLoss", "sigmoid": True}
    with pytest.raises(ConfigError, match=r"^loss\._target_=monai\.losses\.DiceLoss is refused"):
        trusted.build_trusted(loss, "loss")
    assert trusted.build_trusted(loss, "loss", ["monai.losses"]).sigmoid


def test_the_packages_of_a_config_of_the_users_own():
    model = {
        "_target_": "mine.Net",
        "block": {"_target_": "other.Block"},
        "norm": {"_target_": "torch.nn.ReLU"},
    }
    assert trusted.packages_of(model, None, {"_target_": "medconv.convs.smooth"}) == ["mine", "other"]


def test_the_argument_pretrained_is_allowed():
    node = {
        "_target_": "monai.networks.nets.DenseNet121",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
    }
    assert trusted.build_trusted({**node, "pretrained": False}, "model")


def test_a_config_of_a_billion_values_is_refused(trained, tmp_path):
    content = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    content["medconv"]["config"]["data"]["regions"] = shared(9)
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="holds more"):
        load(tmp_path / "x.ckpt")


def test_a_checkpoint_says_which_version_wrote_it(trained, tmp_path):
    content = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    assert content["medconv"]["version"] == medconv.__version__
    content["medconv"]["version"] = "9.9"
    del content["medconv"]["config"]["derived"]
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=rf"written by medconv 9\.9, this is {medconv.__version__}"):
        load(tmp_path / "x.ckpt")


def test_a_package_that_the_user_names_is_trusted(trained, tmp_path):
    content = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    content["medconv"]["config"]["model"]["_target_"] = "helpers.tiny.Net"
    torch.save(content, tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match="is refused"):
        load(tmp_path / "own.ckpt")
    assert type(load(tmp_path / "own.ckpt", trusted=["helpers"]).network).__name__ == "Net"


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [("model", "channels", [-1, 4]), ("model", "channels", [10**30, 4]), ("derived", "num_channels", 10**9)],
)
def test_absurd_sizes_in_a_config_are_refused(trained, tmp_path, group, key, value):
    content = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    content["medconv"]["config"][group][key] = value
    content["medconv"]["config"]["model"]["in_channels"] = value if key == "num_channels" else 1
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError):
        load(tmp_path / "x.ckpt")
