"""What a new run's weights come from if `init.pretrained` is set."""

from typing import Any

from medconv import doors
from medconv.config import ConfigError


def weight_source(name: str) -> Any:
    """What `init.pretrained` names, as `doors.WEIGHT_SOURCES` describes it.

    Raises:
        ConfigError: no feature reads it.
    """
    for find in doors.objects(doors.WEIGHT_SOURCES):
        source = find(name)
        if source is not None:
            return source
    raise ConfigError(
        f"init.pretrained={name}: needs medconv.features.pretrained, or medconv.features.nnunet for the "
        "folder of a trained nnU-Net; this installation does not have it"
    )
