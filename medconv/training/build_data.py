"""The loaders of a run, from its resolved config and its prepared data."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from medconv import config as configs
from medconv.config import ConfigError, DataConfig, RunConfig
from medconv.data.case import Case
from medconv.data.loading.datamodule import DataModule, LoaderSettings, TrainingSamples
from medconv.data.loading.patch import PatchShape
from medconv.data.loading.patch_dataset import ChannelDropout, annotated_classes
from medconv.data.loading.samplers import TrainingCases, class_indices
from medconv.data.preprocessing.preprocess import left_right_axis
from medconv.data.splits import DataSplit
from medconv.performance.step_profiler import StepProfiler
from medconv.training import sampling
from medconv.training.data_setup import PreparedData
from medconv.utils.signals import StopRequest

_CHANNEL_DROPOUT = 0.25  # the default of `data.channel_dropout` where channels may be missing


@configs.arguments_as_keys("data")
def build_data(
    config: RunConfig,
    prepared: PreparedData,
    profiler: StepProfiler | None = None,
    stop_request: StopRequest | None = None,
) -> DataModule:
    """The loaders of a resolved config. Args: profiler, stop_request: of a run."""
    data = config.data
    derived = config.derived
    patch = PatchShape(derived.patch_size, derived.slice_axis)
    class_names = prepared.dataset.class_names
    training_cases = TrainingCases(
        cases=prepared.train,
        patch=patch if prepared.targets.per_voxel else None,
        class_indices=partial(class_indices, prepared.train, prepared.targets, class_names, prepared.store),
    )
    split = DataSplit(prepared.train, prepared.val, prepared.test)
    all_cases = [*split.train, *split.val, *split.test]
    return DataModule(
        prepared.store,
        split,
        TrainingSamples(
            sampler=sampling.build_sampler(config.sampler, data, training_cases),
            patch=patch,
            augment=_augmentation(config),
            seed=config.seed,
            channel_dropout=_channel_dropout(data, derived.num_channels, prepared.train, config.seed),
        ),
        _loader_settings(data),
        annotated=annotated_classes(all_cases, prepared.targets, class_names),
        profiler=profiler,
        stop_request=stop_request,
    )


def _channel_dropout(
    data: DataConfig, num_channels: int, train: Sequence[Case], seed: int
) -> ChannelDropout | None:
    """Raises: ConfigError: a probability where no channel may be missing."""
    if data.missing is None:
        if data.channel_dropout is not None:
            raise ConfigError(f"data.channel_dropout={data.channel_dropout} needs data.missing=allow")
        return None
    probability = _CHANNEL_DROPOUT if data.channel_dropout is None else data.channel_dropout
    missing = {case.id: case.missing_channels for case in train if case.missing_channels}
    return ChannelDropout(probability, num_channels, missing, seed)


def _augmentation(config: RunConfig) -> Any:
    """The configured augmentation, for the patches of this run."""
    derived = config.derived
    return configs.build(
        config.augmentation,
        "augmentation",
        seed=config.seed,
        spacing_mm=derived.spacing_mm,
        patch_size=derived.patch_size,
        flip_label_pairs=configs.lists_to_tuples(derived.flip_label_pairs or []),
        left_right_axis=left_right_axis(derived.slice_axis),
    )


def _loader_settings(data: DataConfig) -> LoaderSettings:
    assert data.batch_size is not None and data.samples_per_epoch is not None  # resolved
    return LoaderSettings(
        batch_size=data.batch_size,
        samples_per_epoch=data.samples_per_epoch,
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=data.persistent_workers,
    )
