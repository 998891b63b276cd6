"""nnU-Net's own prediction of one volume, from the file to the label map, with the toy network of the
benchmark `whole_body`: its reader, preprocessing, sliding window, resampling and argmax.

This script and its neighbours `serving.py` and `toy_prediction.py` stand alone: they are run by the python of
an environment that has nnU-Net, which need not have medconv.

    python3 -m venv FOLDER && FOLDER/bin/pip install nnunetv2==2.8.1
    FOLDER/bin/python scripts/benchmarks/peers/nnunet_predict.py ct.nii.gz 20 0.5 labels.npy

The last line of its output is {"seconds": ..., "peak_gib": ...}.
Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z; https://github.com/MIC-DKFZ/nnUNet, version
2.8.1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __package__:
    from benchmarks.peers import toy_prediction
    from benchmarks.peers.serving import need, one_thread
else:  # a script, run where medconv is not installed
    import toy_prediction  # type: ignore[no-redef]
    from serving import need, one_thread  # type: ignore[no-redef]

CONFIGURATION = "fullres"


def main() -> None:
    need("nnunetv2", "nnU-Net", "nnunetv2==2.8.1")
    image, classes, overlap, *labels = sys.argv[1:]
    one_thread()
    os.environ.update({"nnUNet_def_n_proc": "1"})
    import numpy as np
    import torch

    torch.set_num_threads(1)
    predictor = _predictor(int(classes), float(overlap))
    results: list[Any] = []

    def predict() -> None:
        voxels, properties = predictor.plans_manager.image_reader_writer_class().read_images([image])
        results.append(predictor.predict_single_npy_array(voxels, properties))

    toy_prediction.report(predict)
    if labels:
        # Its axes are Z, Y, X.
        np.save(Path(labels[0]), np.asarray(results[0]).transpose(2, 1, 0))


def _predictor(classes: int, overlap: float) -> Any:
    import torch
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    predictor = nnUNetPredictor(
        tile_step_size=1 - overlap,
        use_mirroring=False,
        perform_everything_on_device=False,
        device=torch.device("cpu"),
        allow_tqdm=False,
    )
    plans = PlansManager(_plans())
    network = toy_prediction.network(classes)
    names = ["background", *(f"organ{index}" for index in range(1, classes))]
    dataset = {
        "labels": {name: index for index, name in enumerate(names)},
        "channel_names": {"0": "CT"},
        "file_ending": ".nii.gz",
    }
    weights = [network.state_dict()]
    predictor.manual_initialization(
        network, plans, plans.get_configuration(CONFIGURATION), weights, dataset, "nnUNetTrainer", None
    )
    return predictor


def _plans() -> dict[str, Any]:
    """What its planner writes for a CT, but the toy's sizes."""
    resampling = {"force_separate_z": None, "order_z": 0}
    configuration: dict[str, Any] = {
        "data_identifier": CONFIGURATION,
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [toy_prediction.PATCH] * 3,
        "spacing": [toy_prediction.NETWORK_MM] * 3,
        "normalization_schemes": ["CTNormalization"],
        "use_mask_for_norm": [False],
        "architecture": {},
    }
    for kind, is_seg, order in (("data", False, 3), ("seg", True, 1), ("probabilities", False, 1)):
        configuration[f"resampling_fn_{kind}"] = "resample_data_or_seg_to_shape"
        configuration[f"resampling_fn_{kind}_kwargs"] = {**resampling, "is_seg": is_seg, "order": order}
    return {
        "dataset_name": "Dataset001_CT",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "label_manager": "LabelManager",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "foreground_intensity_properties_per_channel": {"0": toy_prediction.STATISTICS},
        "configurations": {CONFIGURATION: configuration},
    }


if __name__ == "__main__":
    main()
