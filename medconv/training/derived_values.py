"""What a config's nodes may use of the data and its plan, such as `${derived.num_channels}`."""

from collections.abc import Sequence

from medconv import config as configs
from medconv.config import Derived
from medconv.data import splits
from medconv.data.case import Case, Dataset
from medconv.models.monai_networks import stem_for
from medconv.planning.planner import Plan
from medconv.targets import Targets
from medconv.training.run_dir import short_hash


def derived_values(
    plan: Plan,
    dataset: Dataset,
    train: Sequence[Case],
    targets: Targets,
    flip_label_pairs: tuple[tuple[int, int], ...] = (),
) -> Derived:
    """What follows from the data and its plan.

    Args:
        plan: of the run.
        dataset: all cases.
        train: cases to train on.
        targets: with what follows from the training cases.
        flip_label_pairs: classes that mirroring exchanges.
    """
    monitored = targets.monitored
    planned = {key: configs.tuples_to_lists(value) for key, value in plan.values().items()}
    del planned["batch_size"]  # it stands in `data`
    # The first stage keeps the resolution
    first_strides = [1] * plan.spatial_dims
    return Derived(
        num_channels=len(dataset.modalities),
        num_classes=targets.num_outputs,
        targets=targets.plain(),
        per_voxel=targets.per_voxel,
        class_counts=targets.output_counts(splits.values_of(train)),
        overlapping=not targets.exclusive,
        exclusive=targets.exclusive,
        class_names=list(dataset.class_names),
        flip_label_pairs=configs.tuples_to_lists(flip_label_pairs) or None,
        train_cases=f"{len(train)} cases, {short_hash([case.id for case in train])}",
        **planned,
        stage_strides=[first_strides, *planned["strides"]],
        monitor=monitored.name,
        monitor_mode=monitored.mode,
        num_train_cases=len(train),
        stem=stem_for(planned["patch_size"]),
    )
