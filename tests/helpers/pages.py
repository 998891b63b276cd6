"""The code blocks of README.md and of the pages in docs/, and small data in the place of those that they name."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

from helpers import tiny

FIRST_HOUR = ("README.md", "docs/get-started.md", "docs/python.md", "docs/own-convolution.md")
OTHER = sorted(
    {str(path.relative_to(tiny.ROOT)) for path in (tiny.ROOT / "docs").glob("*.md")} - {*FIRST_HOUR}
)
# what makes a training of a page small
TRAINING = [setting for setting in tiny.SMALL if not setting.startswith(("model.", "trainer.max_steps"))]
TRAINING += ["trainer.max_time=null", "trainer.max_steps=1", "data.samples_per_epoch=2", "logger=none"]
TRAINING += ["callbacks=none", "plan.channels=[4,8]", "task.overlap=0"]
_BLOCK = re.compile(r"(<!-- not run by tests: [^>]+ -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


class Block(NamedTuple):
    page: str
    reason: str  # why no test runs it; empty: a test does
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(page, *found) for found in _BLOCK.findall((tiny.ROOT / page).read_text())]


def runnable(page: str, language: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == language and not block.reason]


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def write_data(home: Path) -> Path:
    """What the pages name as /data."""
    data = home / "data"
    decathlon = tiny.write_dataset(data / "Task04_Hippocampus", cases=5)
    folders = (("imagesTr", "scans", "t1"), ("labelsTr", "masks", "seg"), ("labelsTr", "new_masks", "seg"))
    for kind, name, ending in folders:
        (data / name).mkdir()
        for file in (decathlon / kind).iterdir():
            case = file.name.removesuffix(".nii.gz")
            shutil.copy(file, data / name / f"{case}_{ending}.nii.gz")
    shutil.copytree(decathlon / "labelsTr", data / "new")  # images as good as any
    return data


def with_tiny_data(text: str, home: Path) -> str:
    return text.replace("/data/", f"{home}/data/").replace("hippocampus_001", "case_0")


def smaller(words: list[str]) -> list[str]:
    """A training takes one step with a small network. What the options of the examples do is tested elsewhere:
    of these the config is composed.
    """
    if words[0] not in ("train", "ensemble") or "--cfg" in words:
        return words
    if len(words) == 1:
        return [*words, *TRAINING, "data.layout.num_cases=3", "data.patch_size=[16,16,16]"]
    if "-m" in words or words[0] == "ensemble":
        return [*words, "run.dry_run=true"]
    if not {"run.name=first", "run.name=mine", "run.name=plain", "run.name=own"} & set(words):
        return [*words, "--cfg", "job"]
    flat = "data.root=phantom" in words
    return [*words, *TRAINING, f"data.patch_size={[96, 96] if flat else [16, 16, 16]}".replace(" ", "")]
