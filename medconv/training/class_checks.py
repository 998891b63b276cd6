"""Checks the arguments of the config's classes before any data is read, which may take hours."""

from medconv import config as configs
from medconv.config import Node, RunConfig

# what `build_data` gives an augmentation beside its keys
AUGMENTATION_ARGUMENTS = ("seed", "spacing_mm", "patch_size", "flip_label_pairs", "left_right_axis")
_TRANSFORMS = (
    "transforms of a sample, as MONAI has them, are a list: augmentation=monai augmentation.transforms="
)


def check_classes(config: RunConfig) -> None:
    """Raises: ConfigError: a class has no argument for a key, or needs one that is not set; names the key."""
    configs.check_arguments(config.data.layout, "data.layout")
    model = {key: value for key, value in config.model.items() if key != "divisible_by"}  # of the plan
    configs.check_arguments(model, "model")
    _check_loss(config.loss)
    configs.check_arguments(config.optimizer, "optimizer", positional=1)
    configs.check_arguments(config.scheduler, "scheduler", positional=1)
    configs.check_arguments(config.sampler, "sampler", added=("cases",))
    configs.check_arguments(config.weight_averaging, "weight_averaging")
    configs.check_arguments(config.early_stopping, "early_stopping")
    for name, callback in config.callbacks.items():
        configs.check_arguments(callback, f"callbacks.{name}")
    for name, logger in config.logger.items():
        configs.check_arguments(logger, f"logger.{name}", added=("save_dir",))
    try:
        configs.check_arguments(config.augmentation, "augmentation", added=AUGMENTATION_ARGUMENTS)
    except configs.ConfigError as error:
        raise configs.ConfigError(f"{error}; {_TRANSFORMS}") from error


def _check_loss(loss: Node) -> None:
    # a partial one is a function of logits and labels
    if not loss.get("_partial_"):
        configs.check_arguments(loss, "loss")
