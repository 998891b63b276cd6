"""Checks of a run's config before any data is read, which may take hours."""

import logging

from medconv import config as configs
from medconv.config import RunConfig
from medconv.training.growing_patch import has_end
from medconv.training.optim.build import knows_progress

# what `build_data` gives an augmentation beside its keys
AUGMENTATION_ARGUMENTS = ("seed", "spacing_mm", "patch_size", "flip_label_pairs", "left_right_axis")
_TRANSFORMS = (
    "transforms of a sample, as MONAI has them, are a list: augmentation=monai augmentation.transforms="
)

log = logging.getLogger(__name__)


def check_config(config: RunConfig) -> None:
    """Raises: ConfigError: two values contradict each other; or a class has no argument for a key, or needs
    one that is not set.
    """
    rate = config.optimizer.get("lr")
    if isinstance(rate, (int, float)) and rate > 1:
        log.warning("optimizer.lr=%g: most networks learn nothing above 0.1", rate)
    init = config.init
    if init.thaw_at is not None and not init.freeze:
        raise configs.ConfigError(
            f"init.thaw_at={init.thaw_at} needs init.freeze, the parameters that are frozen until then"
        )
    if init.thaw_at is not None and not (knows_progress(config.scheduler) and has_end(config.trainer)):
        raise configs.ConfigError(
            f"init.thaw_at={init.thaw_at} is a share of the run, but its progress is not known: scheduler."
            f"_target_={config.scheduler['_target_']}, and trainer.max_time, max_steps or max_epochs"
        )
    for key in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(config.trainer, key) == 0:
            raise configs.ConfigError(f"trainer.{key}=0: the run would train no step; expected more than 0")
    accumulated = config.trainer.accumulate_grad_batches
    if config.perf.cuda_graphs and accumulated > 1:
        raise configs.ConfigError(
            f"perf.cuda_graphs=true: gradients lie in the graph's memory, which its next run overwrites, so "
            f"trainer.accumulate_grad_batches must be 1, got {accumulated}"
        )
    configs.check_arguments(config.data.layout, "data.layout")
    model = {key: value for key, value in config.model.items() if key != "divisible_by"}  # of the plan
    configs.check_arguments(model, "model")
    if not config.loss.get("_partial_"):  # a partial one is a function of logits and labels
        configs.check_arguments(config.loss, "loss")
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
