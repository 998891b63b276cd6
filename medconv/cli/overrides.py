"""Help text that `train` and `preprocess` share: the groups of options in `conf/`."""

import textwrap

from medconv import config


def listing() -> str:
    """An explanation of GROUP=OPTION and KEY=VALUE, with a line for each folder of `conf/`."""
    lines = ["GROUP=OPTION:"]
    for folder in sorted(config.conf_dir().iterdir()):
        if folder.is_dir() and folder.name != "hydra":
            names = {file.stem for file in folder.glob("*.yaml")} - {"base"}  # what the others share
            options = ", ".join(sorted(names))
            wrapper = textwrap.TextWrapper(80, f"  {folder.name:<26}", " " * 28, break_on_hyphens=False)
            lines += wrapper.wrap(options)
    shown = "trainer.max_epochs=100      any key that --cfg job prints; +KEY=VALUE adds one"
    return "\n".join([*lines, "", "KEY=VALUE:", f"  {shown}"])
