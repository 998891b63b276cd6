"""What a run's config leaves to its data and its machine: loss, devices and precision."""

from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from medconv import config as configs
from medconv.config import RunConfig
from medconv.targets import Targets
from medconv.utils import cluster
from medconv.utils.hardware import check_devices, resolve_precision


def check_settings(config: RunConfig) -> None:
    """Raises: ConfigError: two values contradict each other."""
    accumulated = config.trainer.accumulate_grad_batches
    if config.perf.cuda_graphs and accumulated > 1:
        raise configs.ConfigError(
            f"perf.cuda_graphs=true: gradients lie in the graph's memory, which its next run overwrites, so "
            f"trainer.accumulate_grad_batches must be 1, got {accumulated}"
        )


def with_loss(config: RunConfig, targets: Targets) -> RunConfig:
    """The config with the targets' default loss for `loss=auto`."""
    if config.loss.get("_target_") is not None:
        return config
    path = configs.conf_dir() / "loss" / f"{targets.default_loss}.yaml"
    loss: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    set_by_user = {key: value for key, value in config.loss.items() if key != "_target_"}
    return replace(config, loss={**loss, **set_by_user})


@configs.arguments_as_keys("trainer")
def with_devices(config: RunConfig) -> RunConfig:
    """The config with the number of machines and devices that the run was launched with, and its precision.

    Raises:
        ValueError: this machine lacks the devices, or they lack the precision.
    """
    trainer = config.trainer
    num_nodes, devices = cluster.processes(trainer.num_nodes, trainer.devices)
    devices = check_devices(devices, trainer.accelerator, cluster.launcher() is not None)
    precision = resolve_precision(trainer.precision, trainer.accelerator)
    trainer = replace(trainer, num_nodes=num_nodes, devices=devices, precision=precision)
    return replace(config, trainer=trainer)
