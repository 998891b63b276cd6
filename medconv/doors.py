"""The doors by which features enter: each is a list that the core walks; docs/architecture.md says where.

A feature is a package: a folder of `medconv/features/`, an installed one with an entry point in the group
`medconv.features`, or one that a command names by `--package`. Its `__init__.py` says what it brings, by one
constant for each door that it uses, such as

    COMMANDS = {"export": ("write a network as ONNX or TorchScript", "medconv.features.export.command")}

and imports nothing else: objects are named as "package.module:object" and loaded when the core asks for them.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

# Subcommands of `medconv`: name -> (one line for the help, module). The module has `parser()`, which imports
# nothing heavy, and `run_command(options) -> exit code`.
COMMANDS = "COMMANDS"

# Metrics of label maps: a tuple of "module:object", each a `medconv.metrics.segmentation.Metric`.
METRICS = "METRICS"

# Options of `medconv predict`: "module:object" -> `flags`: flag -> arguments of argparse's `add_argument`;
# and `folders` that the feature writes beside predictions: name -> suffix of their files, one for each case;
# empty: a folder of files for each case.
# Where a flag is given, the object is called with all options, and gives a `medconv.inference.extras.Extra`.
PREDICT_OPTIONS = "PREDICT_OPTIONS"

# What `medconv evaluate` measures of files beside predicted label maps: a tuple of "module", each with `KEY`
# of the result, `measure(folder, cases, names)` -> its value, or None where there are no such files,
# `lines(value)` for the terminal, and `figure(result)` -> (title, PNG, note) for the report.
EVALUATIONS = "EVALUATIONS"

# Reports of `medconv evaluate`: a tuple of "module:object", called with the `Evaluation`, -> an HTML page, or
# None: it is of another kind.
REPORTS = "REPORTS"

# What `init.pretrained` may name: functions of its text, asked in turn, which return None for what they do
# not read, or an object with
#   settings(config) -> the config with what is known of the network and its preprocessing, before the data
#   earlier_plan(config) -> `EarlierPlan` of the run that the weights are from; None: not known
#   load(network, config, derived): overwrites the network's tensors; the config has its interpolations
WEIGHT_SOURCES = "WEIGHT_SOURCES"

# Kinds of targets: name -> "module:object", a subclass of `medconv.targets.Targets` with this `kind`.
TARGETS = "TARGETS"

# What measures what a config leaves open: what it is -> "module:object", a function
#   "settings": (resolved config, `RunDir`) -> the config with values for the keys that
#       `config.schema.open_keys` names
#   "size": (config, planned, derive, budget) -> the `Plan` of the size whose steps fit into
#       `trainer.max_time`; planned: (size, reason, warns=True) -> `Plan`; derive: `Plan` -> `Derived`
#   "steps": (config, `Plan`, `Derived`) -> how many of the plan's steps fit into `trainer.max_time`
TUNERS = "TUNERS"

# What a run tells of itself beside its scores: a tuple of modules with
#   before(resolved config) -> keys of `summary.json`, before it trains; on rank 0
#   after(resolved config, its `StepProfiler`) -> more keys, at its end; on rank 0
#   explain(step, saves, trainer, module, statistics, folder) -> sentences on a step whose gradient is not
#       finite, on all ranks; step: a `StepRecord` of `medconv/training/callbacks/nonfinite_guard.py`; saves:
#       whether its batch is worth a file in the folder; statistics: of the module's batch norms
REMARKS = "REMARKS"

# Formats of images: a tuple of "module:object", each a `medconv.data.io.formats.ImageFormat`.
IMAGE_FORMATS = "IMAGE_FORMATS"

named_packages: list[str] = []  # that the command line names, by `add_package`


def add_package(name: str) -> None:
    """Let a package of the user's own enter. Raises: ImportError: it cannot be imported."""
    import_module(name)
    if name not in named_packages:
        named_packages.append(name)
        features.cache_clear()


@cache
def features() -> tuple[ModuleType, ...]:
    """The packages of all features, without what they load later."""
    ours: list[str] = []
    with suppress(ModuleNotFoundError):  # the core works without any
        package = import_module("medconv.features")
        ours = sorted(f"medconv.features.{module.name}" for module in iter_modules(package.__path__))
    installed = [entry.value for entry in entry_points(group="medconv.features")]
    return tuple(import_module(name) for name in dict.fromkeys([*ours, *installed, *named_packages]))


def missing_feature(target: str) -> str | None:
    """The feature of `medconv` that a class, named by its dotted path, is of, if it is not there."""
    package, _, rest = target.partition("medconv.features.")
    name = f"medconv.features.{rest.partition('.')[0]}"
    if package or not rest:
        return None
    with suppress(ModuleNotFoundError):  # there is no folder of features
        if find_spec(name) is not None:
            return None
    return name


def mapping(door: str) -> dict[str, Any]:
    """What all features bring through a door whose constant is a dict, by name; nothing is loaded."""
    return {name: entry for feature in features() for name, entry in getattr(feature, door, {}).items()}


def objects(door: str) -> Iterator[Any]:
    """What all features bring through a door whose constant is a tuple of "module:object", loaded."""
    for feature in features():
        for entry in getattr(feature, door, ()):
            yield load(entry)


def named(door: str, name: str) -> Any:
    """What a feature brings by this name through a door whose constant is a dict, loaded; None: none does."""
    entry = mapping(door).get(name)
    return None if entry is None else load(entry)


def load(entry: str) -> Any:
    """The object that "package.module:object" names."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)
