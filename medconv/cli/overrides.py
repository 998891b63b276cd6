"""Help text that `train` and `preprocess` share: the groups of options in `conf/`."""

from __future__ import annotations

import textwrap

from medconv import config

_WIDTH, _COLUMN = 100, 28


def listing() -> str:
    """An explanation of GROUP=OPTION and KEY=VALUE, with a line for each folder of `conf/`."""
    home = config.conf_dir()
    groups = {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(home.iterdir())
        if folder.is_dir() and folder.name != "hydra"
    }
    lines = ["GROUP=OPTION:"]
    for name, options in groups.items():
        lines += textwrap.wrap(
            ", ".join(options),
            _WIDTH,
            initial_indent=f"  {name:<{_COLUMN - 2}}",
            subsequent_indent=" " * _COLUMN,
            break_on_hyphens=False,
        )
    lines += [
        "",
        "KEY=VALUE:",
        "  trainer.max_epochs=100      any key that --cfg job prints; +KEY=VALUE adds one",
    ]
    return "\n".join(lines)
