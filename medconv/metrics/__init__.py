"""Numbers and plots from arrays alone. A module here is imported with the package, so that its metrics are
found.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
