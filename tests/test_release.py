"""What a release publishes: links of the README, and versions and dependencies that are written twice."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import medconv

ROOT = Path(__file__).parent.parent


def test_no_link_of_the_readme_is_relative_on_the_package_index(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    (command,) = (step["run"] for step in steps if "README.md" in step.get("run", ""))
    environment = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v0.2.0", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environment, check=True)

    before, after = (
        re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text()) for folder in (ROOT, tmp_path)
    )
    raw = "https://raw.githubusercontent.com/owner/name/v0.2.0/"
    page = "https://github.com/owner/name/blob/v0.2.0/"
    assert len(before) > 15
    bases = ["" if "://" in link else raw if link.startswith("docs/images/") else page for link in before]
    assert after == [base + link for base, link in zip(bases, before, strict=True)]


def test_the_badges_say_what_is_true(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs/badges.py", tmp_path], check=True)
    expected, drawn = (
        {file.name: file.read_text() for file in folder.glob("badge-*.svg")}
        for folder in (tmp_path, ROOT / "docs/images")
    )
    assert drawn == expected, "run `python docs/badges.py docs/images`"
    readme = (ROOT / "README.md").read_text()
    for name, svg in drawn.items():
        (text,) = re.findall("<title>(.*)</title>", svg)
        assert f"![{text}](docs/images/{name})".lower() in readme.lower()


CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def yaml_file(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_citation_and_zenodo_agree():
    citation = yaml_file("CITATION.cff")
    zenodo = json.loads((ROOT / ".zenodo.json").read_text())
    for key in ("title", "license", "version", "keywords"):
        assert zenodo[key] == citation[key], key
    assert zenodo["creators"] == citation["authors"]
    assert zenodo["upload_type"] == citation["type"]


def test_all_files_and_the_newest_changes_have_the_version_of_the_package():
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == medconv.__version__
    assert yaml_file("CITATION.cff")["version"] == medconv.__version__
    assert yaml_file("conda/recipe.yaml")["context"]["version"] == medconv.__version__


def test_the_conda_recipe_has_the_dependencies_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    recipe = yaml_file("conda/recipe.yaml")
    expected = [conda_name(need) for need in project["project"]["dependencies"]]
    assert recipe["requirements"]["run"] == ["python >=${{ python_min }}", *expected]
    assert recipe["requirements"]["host"][2:] == list(map(conda_name, project["build-system"]["requires"]))
    command = " = ".join(*project["project"]["scripts"].items())
    assert recipe["build"]["python"]["entry_points"] == [command]


def test_every_dependency_of_the_wheel_is_pinned():
    pins = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {conda_name(need).split()[0] for need in needs} | {"torch", "matplotlib"}
    assert names - set(CONDA_NAMES.values()) <= pins


def conda_name(requirement):
    """`torch>=2.11` -> `pytorch >=2.11`."""
    name, bounds = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
    return f"{CONDA_NAMES.get(name, name)} {bounds}"
