"""The validated cases of a cross-validation, from the dataset that its runs' config names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from medconv import config as configs
from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import msd
from medconv.data.datasets.phantom import phantom
from medconv.features.cross_validation.results import CrossValidation
from medconv.utils.errors import explained
from medconv.utils.logging import some

_JOINED = "medconv.features.joined.layout.joined"
# each by its full name, since other functions beside them write files
_LAYOUTS = (
    "medconv.data.datasets.dataset_json.auto",
    "medconv.data.datasets.dataset_json.msd",
    "medconv.data.datasets.folder.folder",
    "medconv.data.datasets.dataset_json.nnunet",
    "medconv.data.datasets.phantom.phantom",
)


def validated_cases(crossval: CrossValidation, runs: Path, trusted: Sequence[str]) -> dict[str, Case]:
    """Case id to case, of every case that a fold validated.

    Args:
        crossval: complete.
        runs: folder of its runs, for messages.
        trusted: packages whose layouts may be called.
    Raises:
        ConfigError: the dataset is of a kind for which no post-processing is searched.
        ValueError: the dataset lacks some cases now.
    """
    values = crossval.folds[0].values
    for key, value in values.items():
        _check_value(key, value)
    dataset = dataset_of(crossval.folds[0].config, trusted)
    cases_by_id = {case.id: case for case in dataset.cases}
    validated = [case_id for _, case_id, _ in crossval.cases]
    missing = []
    for case_id in validated:
        if case_id not in cases_by_id or cases_by_id[case_id].label is None:
            missing.append(case_id)
    if missing:
        root = values.get("data.root") or values.get("data.images")
        raise ValueError(
            f"{root}: not the dataset of {runs}, it lacks {len(missing)} of {len(validated)} cases: "
            f"{some(missing)}"
        )
    return {case_id: cases_by_id[case_id] for case_id in validated}


def _check_value(key: str, value: Any) -> None:
    lacks_labels = key.startswith("data.annotated") and value is not None
    if lacks_labels or str(value) == _JOINED:
        raise configs.ConfigError(
            f"{key}={value}: post-processing is not searched for where cases lack labels"
        )
    if (key == "data.raters" and value is not None) or (key == "data.soft_labels" and value is True):
        raise configs.ConfigError(f"{key}={value}: post-processing is searched for with label maps only")
    if key == "data.ignore_label" and isinstance(value, list):
        raise configs.ConfigError(
            f"{key}={value}: post-processing is searched for with one value to ignore only"
        )


def dataset_of(config: Mapping[str, Any], trusted: Sequence[str]) -> Dataset:
    """The dataset that a run's config names; its arguments are values, never something to build or call.

    Args:
        config: the nested values of a run, which may be untrusted.
        trusted: packages whose layouts may be called.
    Raises:
        ConfigError: its layout is a function of a package not trusted, or names more to be called.
    """
    node = _layout_node(config)
    target = str(node.get("_target_"))
    if target not in _LAYOUTS and not _is_in_packages(target, trusted):
        raise configs.ConfigError(
            f"data.layout._target_={target} is refused: it is neither a layout of medconv nor of a trusted "
            "package"
        )
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    for key, nested in configs.iter_nodes(arguments, "data.layout"):
        target = nested["_target_"]
        raise configs.ConfigError(f"{key}._target_={target} is refused: a layout takes plain values")
    function = get_object(target)
    if function is phantom:
        # the phantom writes its files; if they are gone, they are not what was trained on
        function = msd
        arguments = {"root": arguments.get("root")}
    problem = f"data.layout: {target} cannot be called with {arguments!r:.200}"
    with configs.arguments_as_keys("data"), explained(problem, TypeError, AttributeError):
        dataset = function(**arguments)
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise configs.ConfigError(f"data.layout._target_={target} is not a layout: it returns {kind}")
    return dataset


def _layout_node(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`data.layout`; empty if the config has none."""
    data = config.get("data")
    layout = data.get("layout") if isinstance(data, Mapping) else None
    return layout if isinstance(layout, Mapping) else {}


def _is_in_packages(target: str, packages: Sequence[str]) -> bool:
    """Whether a function is named as one of these packages, and defined in it, not only imported there."""
    if not target.startswith(tuple(f"{package}." for package in packages)):
        return False
    module = str(getattr(get_object(target), "__module__", ""))
    return any(module == package or module.startswith(f"{package}.") for package in packages)
