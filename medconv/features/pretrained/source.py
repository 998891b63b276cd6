"""`init.pretrained` of a file: its weights, and the plan of the run that it is from."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from medconv import config as configs
from medconv.config import ConfigError, Derived, Node, RunConfig
from medconv.config.instantiate import class_of
from medconv.features.pretrained.fit import layers_of
from medconv.features.pretrained.hub import is_remote, local_file
from medconv.features.pretrained.load import Origin, Report, load
from medconv.features.pretrained.read import planned_as
from medconv.planning.limits import SIZES, EarlierPlan
from medconv.targets import Targets

log = logging.getLogger(__name__)


def find(name: str) -> "WeightFile | None":
    """The file that `init.pretrained` names; None: a folder."""
    return None if Path(name).is_dir() else WeightFile(name)


@dataclass(frozen=True)
class WeightFile:
    """A file of weights without plans of its own. It need not exist: a resumed run has its weights.

    Args:
        name: a path, or `hf://OWNER/NAME/FILE`.
    """

    name: str

    def settings(self, config: RunConfig) -> RunConfig:
        """The same config; warns if there is no file."""
        if not is_remote(self.name) and not Path(self.name).exists():
            log.warning(
                "init.pretrained=%s: no such file or folder; only a stopped run resumes without a file, and "
                "the folder of a trained nnU-Net also holds its plans",
                self.name,
            )
        return config

    def earlier_plan(self, config: RunConfig) -> EarlierPlan | None:
        """Of the run that a file of ours is from; None: another file.

        Raises:
            ValueError: the file cannot be read, or has an unknown size.
        """
        recorded = planned_as(local_file(self.name))
        if not recorded:
            return None
        if recorded["size"] not in SIZES:
            raise ConfigError(
                f"init.pretrained={self.name}: is of a network of size {recorded['size']}, expected one of "
                f"{', '.join(SIZES)}"
            )
        return EarlierPlan(
            origin="that of the weights to begin from",
            size=recorded["size"],
            takes_slices=recorded["slice_axis"] is not None and _suits_slices(config),
        )

    def load(self, network: nn.Module, config: RunConfig, derived: Derived) -> Report:
        """Overwrites the tensors of a network for which the file has some. Raises: ValueError: as `load`."""
        return load_weights(network, local_file(self.name), config, derived)


def load_weights(
    network: nn.Module, path: Path, config: RunConfig, derived: Derived, origin: Origin | None = None
) -> Report:
    """`load`, which treats the first and the last layers of this config's network differently.

    They are those that change with the number of channels and of classes: shapes alone do not tell them from
    a layer that has as many channels by chance.

    Args:
        config: with its interpolations.
    """

    def model(derived: Derived) -> Node:
        return Targets.from_plain(derived.targets).model(configs.with_derived(config, derived).model)

    layers = layers_of(
        model(derived),
        more_channels=model(replace(derived, num_channels=derived.num_channels + 1)),
        more_outputs=model(replace(derived, num_classes=derived.num_classes + 1)),
    )
    return load(network, path, derived, layers, config.init.inflate_2d, origin, config.conv)


def _suits_slices(config: RunConfig) -> bool:
    """Whether nothing in the config needs three axes."""
    values_per_axis = (
        config.init.inflate_2d,
        config.data.spacing_mm,
        config.data.patch_size,
        config.plan.strides,
        config.plan.kernel_sizes,
    )
    if any(value is not None for value in values_per_axis):
        return False
    return getattr(class_of(config.conv["_target_"]), "spatial_dims", None) != 3
