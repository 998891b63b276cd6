"""What the workflow of a release does to the files that it publishes."""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_no_link_of_the_readme_is_relative_on_the_package_index(tmp_path: Path) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    (command,) = (step["run"] for step in steps if "README.md" in step.get("run", ""))
    environment = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v0.1.0", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environment, check=True)

    before, after = (
        re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text()) for folder in (ROOT, tmp_path)
    )
    raw = "https://raw.githubusercontent.com/owner/name/v0.1.0/"
    page = "https://github.com/owner/name/blob/v0.1.0/"
    assert len(before) > 15
    assert after == [(raw if link.startswith("docs/images/") else page) + link for link in before]
