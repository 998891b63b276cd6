"""Methods mixed into the class of a module that is there already, whose parameters and hooks stay."""

from functools import cache
from typing import Any

from torch import nn


class Mixin(nn.Module):
    """Mixed into a module's class, so that its children, `deepcopy` and pickling stay as they were."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that was made here, but it finds the two that it was made of
        mixin, module_class = type(self).__bases__
        return _blank, (mixin, module_class), self.__getstate__()


def mixed(mixin: type, module: nn.Module) -> Any:
    """The class of a mixin and that of a module."""
    module_class: Any = type(module)
    return _mixed(mixin, module_class)


@cache
def _mixed(mixin: type, module_class: type) -> Any:
    name = f"{mixin.__name__.strip('_')}{module_class.__name__}"
    return type(name, (mixin, module_class), {})


def _blank(mixin: type, module_class: type) -> Any:
    """For copying and unpickling: an empty module, whose state is set afterwards."""
    mixed_class = _mixed(mixin, module_class)
    return mixed_class.__new__(mixed_class)
