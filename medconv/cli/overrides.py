"""Help text that `train` and `preprocess` share: the groups of options in `conf/`."""

import textwrap

from medconv.config.schema import groups, list_options

_WIDTH = 80  # characters of a line
_NAME_WIDTH = 26  # characters of a group's name
_AFTER_GROUPS = """\

KEY=VALUE:
  trainer.max_epochs=100      any key of --cfg job; +KEY=VALUE adds an argument
                              that the class accepts"""


def listing() -> str:
    """An explanation of GROUP=OPTION and KEY=VALUE, with a line for each folder of `conf/`."""
    lines = ["GROUP=OPTION:"]
    for group in groups():
        lines += textwrap.wrap(
            ", ".join(list_options(group)),
            _WIDTH,
            initial_indent=f"  {group:<{_NAME_WIDTH}}",
            subsequent_indent=" " * (_NAME_WIDTH + 2),
            break_on_hyphens=False,
        )
    return "\n".join([*lines, _AFTER_GROUPS])
