"""Help text that `train` and `preprocess` share: the groups of options in `conf/`."""

import textwrap
from pathlib import Path

from medconv import config

_WIDTH = 80  # characters of a line
_NAME_WIDTH = 26  # characters of a group's name
_AFTER_GROUPS = """\

KEY=VALUE:
  trainer.max_epochs=100      any key of --cfg job; +KEY=VALUE adds one for a class"""


def listing() -> str:
    """An explanation of GROUP=OPTION and KEY=VALUE, with a line for each folder of `conf/`."""
    lines = ["GROUP=OPTION:"]
    for folder in sorted(config.conf_dir().iterdir()):
        if folder.is_dir() and folder.name != "hydra":
            lines += _group_lines(folder)
    return "\n".join([*lines, _AFTER_GROUPS])


def _group_lines(folder: Path) -> list[str]:
    names = {file.stem for file in folder.glob("*.yaml")}
    # What the options of a group share is no option itself.
    names.discard("base")
    return textwrap.wrap(
        ", ".join(sorted(names)),
        _WIDTH,
        initial_indent=f"  {folder.name:<{_NAME_WIDTH}}",
        subsequent_indent=" " * (_NAME_WIDTH + 2),
        break_on_hyphens=False,
    )
