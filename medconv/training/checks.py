"""What is wrong with the config of a run, before it reads any data."""

import logging

from medconv import config as configs
from medconv.config import ConfigError, RunConfig
from medconv.config.values import as_text, enumeration
from medconv.models.build import check_conv
from medconv.training.growing_patch import has_end
from medconv.training.optim.build import knows_progress, log_schedule, with_epochs
from medconv.training.trainer import epochs_of

# What `build_data` gives an augmentation beside its keys
_AUGMENTATION_ARGUMENTS = ("seed", "spacing_mm", "patch_size", "flip_label_pairs", "left_right_axis")
_PROFILERS = ("simple", "advanced", "pytorch", "xla")  # that Lightning knows by a word
_TRANSFORMS = (
    "transforms of a sample, as MONAI has them, are a list: augmentation=monai augmentation.transforms="
)

log = logging.getLogger(__name__)


def check_config(config: RunConfig) -> None:
    """Looks for contradictions before any data is read, which may take hours; a dry run ends here.

    Raises: ConfigError: two values contradict each other; or a class has no argument for a key, or needs
    one that is not set.
    """
    check_conv(config.conv)
    rate = config.optimizer.get("lr")
    if isinstance(rate, (int, float)) and rate < 0:
        raise ConfigError(f"optimizer.lr must be 0 or more, got {rate:g}")
    if isinstance(rate, (int, float)) and rate > 1:
        log.warning("optimizer.lr=%g: most networks learn nothing above 0.1", rate)
    init = config.init
    if init.thaw_at is not None and not init.freeze:
        raise ConfigError(
            f"init.thaw_at={init.thaw_at} needs init.freeze, the parameters that are frozen until then"
        )
    if init.thaw_at is not None and not (knows_progress(config.scheduler) and has_end(config.trainer)):
        raise ConfigError(
            f"init.thaw_at={init.thaw_at} is a share of the run, but its progress is not known: scheduler."
            f"_target_={config.scheduler['_target_']}, and trainer.max_time, max_steps or max_epochs"
        )
    if init.freeze and init.pretrained is None and init.thaw_at is None:
        log.warning("init.freeze without init.pretrained: these layers keep their random values for ever")
    for key in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(config.trainer, key) == 0:
            raise ConfigError(f"trainer.{key}=0: the run would train no step; expected more than 0")
    if config.trainer.barebones:
        raise ConfigError("trainer.barebones=true leaves out checkpoints, which every run writes")
    profiler = config.trainer.profiler
    if isinstance(profiler, str) and profiler.lower() not in _PROFILERS:
        raise ConfigError(
            f"trainer.profiler must be {enumeration(_PROFILERS)}, null or a node with _target_, "
            f"got {profiler}"
        )
    accumulated = config.trainer.accumulate_grad_batches
    if config.perf.cuda_graphs and accumulated > 1:
        raise ConfigError(
            f"perf.cuda_graphs=true: gradients lie in the graph's memory, which its next run overwrites, so "
            f"trainer.accumulate_grad_batches must be 1, got {accumulated}"
        )
    if init.inflate_2d is not None and init.pretrained is None:
        raise ConfigError(f"init.inflate_2d={init.inflate_2d} needs init.pretrained, a 2D network's weights")
    for name in ("early_stopping", "weight_averaging", "sampler"):
        node = getattr(config, name)
        unused = [key for key in node if key != "_target_"]
        if unused and node.get("_target_") is None:
            raise ConfigError(
                f"{name}.{unused[0]}={as_text(node[unused[0]])}: this option of {name} has no keys; choose "
                f"another, {name}=NAME"
            )
    if config.data.num_workers == 0 and config.data.persistent_workers:
        raise ConfigError("data.persistent_workers=true needs workers, got data.num_workers=0")
    configs.check_arguments(config.data.layout, "data.layout")
    model = {key: value for key, value in config.model.items() if key != "divisible_by"}  # of the plan
    configs.check_arguments(model, "model")
    if not config.loss.get("_partial_"):  # a partial one is a function of logits and labels
        configs.check_arguments(config.loss, "loss")
    configs.check_arguments(config.optimizer, "optimizer", positional=1)
    scheduler = with_epochs(config.scheduler, epochs_of(config.trainer))
    log_schedule(config.scheduler, scheduler)
    configs.check_arguments(scheduler, "scheduler", positional=1)
    configs.check_arguments(config.sampler, "sampler", added=("cases",))
    configs.check_arguments(config.weight_averaging, "weight_averaging")
    configs.check_arguments(config.early_stopping, "early_stopping")
    for name, callback in config.callbacks.items():
        configs.check_arguments(callback, f"callbacks.{name}")
    for name, logger in config.logger.items():
        configs.check_arguments(logger, f"logger.{name}", added=("save_dir",))
    try:
        configs.check_arguments(config.augmentation, "augmentation", added=_AUGMENTATION_ARGUMENTS)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_TRANSFORMS}") from error
