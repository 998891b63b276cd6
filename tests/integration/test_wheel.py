"""The built wheel: its configs travel along, README's commands of a first hour run, people's own YAMLs load."""

import json

import pytest
from helpers import pages, tiny, wheel

import medconv


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return wheel.install(tmp_path_factory.mktemp("wheel"))


# runs `medconv` several times, as an interpreter would that need not load the libraries again
SEVERAL = """
import json, runpy, sys
script, commands = sys.argv[1:]
for arguments in json.loads(commands):
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            sys.exit(ended.code)
"""


def test_configs_travel_along(installed, tmp_path):
    assert (installed / "medconv/conf/train.yaml").is_file()
    assert (installed / "medconv/py.typed").is_file()
    assert not (installed / "medconv/benchmarks").exists()
    assert not (installed / "benchmarks").exists()
    version = wheel.start(installed, tmp_path, "medconv", "--version")
    assert version.stdout == f"medconv {medconv.__version__}\n"
    words = ["train", "--cfg", "job", "--resolve", "data=msd", "data.root=x", "-p", "data"]
    shown = wheel.start(installed, tmp_path, "medconv", *words)
    assert shown.returncode == 0, shown.stdout
    assert "medconv.data.datasets.dataset_json.msd" in shown.stdout


@pytest.mark.slow
def test_first_hour_and_own_yaml_from_another_folder(installed, tmp_path):
    """README's first run and those on data of one's own; then a network of one's own, data in a folder whose
    name has a space.
    """
    pages.write_data(tmp_path)
    text = pages.with_tiny_data("".join(pages.runnable("README.md", "bash")[:2]), tmp_path)
    first_hour = [pages.smaller(words) for _, *words in pages.commands(text)]
    assert [words[0] for words in first_hour] == ["train", "preprocess", "train", "predict", "evaluate"]

    (tmp_path / "mine/model").mkdir(parents=True)
    original = (tiny.ROOT / "conf/model/customconv.yaml").read_text()
    own = original.replace("convs_per_stage: 2", "convs_per_stage: 1")
    (tmp_path / "mine/model/ours.yaml").write_text(own)
    dataset = tiny.write_dataset(tmp_path / "a folder/tiny", cases=4)
    root = ["data=msd", f"data.root='{dataset}'", f"data.cache_dir='{dataset.parent}/prepared'"]
    own_network = ["train", "--config-dir", "mine", *root, *tiny.SMALL, "model=ours", "run.name=r"]

    commands = json.dumps([*first_hour, own_network])
    done = wheel.start(installed, tmp_path, "python", "-c", SEVERAL, installed / "bin/medconv", commands)
    assert done.returncode == 0, done.stdout
    assert "convs_per_stage: 1" in (tmp_path / "runs/r/config.yaml").read_text()
    assert len(list((tmp_path / "predictions").glob("*.nii.gz"))) == 5
    assert "mean foreground" in done.stdout
    assert "</html>" in (tmp_path / "metrics.html").read_text()
