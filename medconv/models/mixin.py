"""Methods mixed into the class of a module that is there already, whose parameters and hooks stay."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn

_PARTS = "_parts"  # attribute of a class that was made here: its mixin and the module's class


class Mixin(nn.Module):
    """Mixed into a module's class, so that its children, `deepcopy` and pickling stay as they were."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that was made here, but it finds those that it was made of
        mixins: list[type] = []
        module_class: type = type(self)
        while _PARTS in vars(module_class):
            mixin, module_class = vars(module_class)[_PARTS]
            mixins.insert(0, mixin)
        return _blank, (mixins, module_class), self.__getstate__()


def mixed(mixin: type, module: nn.Module) -> Any:
    """The class of a mixin and that of a module."""
    module_class: Any = type(module)
    return _mixed(mixin, module_class)


@cache
def _mixed(mixin: type, module_class: type) -> Any:
    name = f"{mixin.__name__.strip('_')}{module_class.__name__}"
    return type(name, (mixin, module_class), {_PARTS: (mixin, module_class)})


def _blank(mixins: Sequence[type], module_class: Any) -> Any:
    """For copying and unpickling: an empty module, whose state is set afterwards."""
    for mixin in mixins:
        module_class = _mixed(mixin, module_class)
    return module_class.__new__(module_class)
