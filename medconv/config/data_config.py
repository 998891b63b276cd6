"""The keys of `data`: which dataset, how it is prepared, split and loaded."""

from dataclasses import dataclass
from math import inf
from typing import Any

from omegaconf import MISSING

from medconv.config.keys import Node, key


@dataclass(frozen=True)
class DataConfig:
    # where the cases are
    layout: Node = key(MISSING, "the class that finds the cases of a dataset, and its arguments")
    root: str | None = key(None, "folder of the dataset; for data=csv the table")
    images: Any = key(
        None,
        "data=folder: pattern of image files with {id}, or one for each channel",
        accepts=str | dict[str, str] | None,
    )
    labels: str | None = key(None, "data=folder: pattern of label files with {id}")
    class_names: list[str] | None = key(None, "names of the classes, the background first")
    modality: str = key("MRI", "CT has a normalisation of its own")
    # which cases train and which validate
    fold: Any = key(0, "0 ... num_folds - 1, or `all` to train on every case", accepts=int | str)
    num_folds: int = key(
        5, "number of cross-validation folds: sorted ids, shuffled with seed 12345, as nnU-Net's", ge=2
    )
    group_pattern: str | None = key(
        None,
        "regular expression for the patient in a case id, such as '(patient\\d+)'; these stay in one fold",
    )
    splits_file: str | None = key(None, "a splits_final.json to use instead of folds by number")
    # preprocessing; what is null follows from the plan of the data
    cache_dir: str = key(MISSING, "folder of prepared cases")
    spacing_mm: list[float] | None = key(
        None, "grid to resample to, right-anterior-superior; null plans it", gt=0, lt=inf
    )
    source_spacing_mm: Any = key(
        None,
        "of files whose headers have lost it, such as [1.25,1.25,10], or {siteA_*: [...]} by case id",
        accepts=list[float] | dict[str, list[float]] | None,
        gt=0,
        lt=inf,
    )
    patch_size: list[int] | None = key(None, "in voxels of the resampled grid; null plans it", ge=1)
    normalisation: Any = key(
        None,
        "of intensities, one name or one per channel; null decides by modality",
        accepts=str | list[str] | None,
        choices=("zscore", "zscore_nonzero", "ct", "dataset", "rescale", "none"),
    )
    intensities: Any = key(
        None,
        "for ct and dataset, per channel: {mean, std, percentile_00_5, percentile_99_5}; null measures",
        accepts=list[dict[str, float]] | None,
    )
    convention: str | None = key(
        None,
        "nnunet: axes as stored, nnU-Net's resampling and windows; nnunet_ras: axes turned",
        choices=("nnunet", "nnunet_ras"),
    )
    spatial_dims: int | None = key(
        None, "of the network: 2 trains on slices of volumes; null: as the data", choices=(2, 3)
    )
    slice_axis: int | None = key(
        None, "axis across the slices of a 2D network; null: the coarsest axis", choices=(0, 1, 2)
    )
    # what labels mean
    flip_label_pairs: Any = key(
        None,
        "pairs of classes that swap when mirroring, such as [[left_kidney, right_kidney]]",
        accepts=list[Any] | None,
    )
    regions: Node | None = key(
        None, "overlapping regions of classes, a sigmoid each, such as {whole: [edema, core], core: [core]}"
    )
    regions_order: list[int] | None = key(
        None, "label value that each region writes into a prediction; later ones overwrite earlier ones"
    )
    ignore_label: Any = key(
        None,
        "value or name of unlabelled voxels, above all classes; excluded from loss and metrics",
        accepts=int | str | list[int | str] | None,
    )
    # patterns of case ids are those of a shell, such as siteA_*
    annotated: Any = key(
        None,
        "cases that lack some labels: the labelled classes, such as {siteA_*: [liver, spleen]} by case id",
        accepts=dict[str, list[str]] | None,
    )
    raters: Any = key(
        None,
        "folder or pattern of label files by a further rater, or a list of them: trains on the mean",
        accepts=str | list[str] | None,
    )
    soft_labels: bool | None = key(None, "true: label files hold the probability of each class")
    missing: str | None = key(
        None,
        "allow: cases may lack channels; the network learns to do without, and predict takes such cases",
        choices=("allow",),
    )
    channel_dropout: float | None = key(
        None,
        "with missing=allow, the probability with which training drops each channel; null: 0.25",
        ge=0,
        lt=1,
    )
    case_weights: Any = key(
        None,
        "such as {siteA_*: 2}: these cases are drawn twice as often",
        accepts=dict[str, float] | None,
        gt=0,
        lt=inf,
    )
    entries: Any = key(
        None,
        "data=joined: several datasets by name, each with its layout and keys",
        accepts=dict[str, Any] | None,
    )
    # tables (data=csv) and image-level targets
    path_column: str = key("path", "data=csv: column with the image file")
    label_columns: Any = key(
        None, "data=csv: column with the label, or a list of columns", accepts=str | list[str] | None
    )
    split_column: str | None = key(None, "data=csv: column with train, val or test")
    group_column: str | None = key(None, "data=csv: column with the patient")
    target_type: str | None = key(None, "data=csv: kind of targets; null: by the columns")
    resize: list[int] | None = key(
        None, "for image-level targets: size in voxels that each image is scaled to", ge=1
    )
    # sampling and loading
    balanced_sampling: bool = key(False, "true draws each class equally often")
    batch_size: int | None = key(None, "per device; null plans it", ge=1)
    samples_per_epoch: int | None = key(
        None, "over all devices; null: 1000; of whole images 5 per training case, 1000 to 5000", ge=1
    )
    oversample_foreground: float = key(
        0.33, "share of patches that are centred on a foreground voxel", ge=0, le=1
    )
    num_workers: int | None = key(
        None, "loader processes per device; null: half of the cores, 8 or fewer", ge=0
    )
    prefetch_factor: int = key(2, "batches that each worker keeps ready", ge=1)
    persistent_workers: bool | None = key(None, "keep workers between epochs; null: if there are workers")
    prepare_workers: int | None = key(
        None, "cases checked or prepared at once; null: one per core, 8 or fewer", ge=1
    )
    on_invalid_case: str = key(
        "raise",
        "raise an error, or skip invalid cases and list them in the log and summary.json",
        choices=("raise", "skip"),
    )
