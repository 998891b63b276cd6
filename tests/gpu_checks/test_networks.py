"""scripts/gpu_checks/networks.py: the sizes whose limits are computed are those that trainings there plan."""

from helpers import tiny

from gpu_checks import data
from gpu_checks.networks import LARGE_PATCHES, LARGE_PHANTOM, PHANTOM, Size
from gpu_checks.setting import Setting
from medconv import config
from medconv.data.preprocessing.dataset_cache import cached_fingerprint
from medconv.training.data_setup import find_data
from medconv.training.plan_setup import make_plan

ON_GPU = ("trainer.accelerator=cpu", "trainer.precision=bf16-mixed", "plan.memory_gb=24")


def planned(folder, *words):
    """On a large GPU. Returns: also the number of classes."""
    setting = Setting("cuda", False, folder, folder / "shared", limit_s=60)
    settings = config.validate(tiny.composed(*setting.overrides("run", *words), *ON_GPU))
    dataset = find_data(settings.data)
    measured, _ = cached_fingerprint(dataset, folder / "prepared")
    return make_plan(settings, dataset, measured), dataset.targets.num_outputs


def size_of(plan, classes):
    assert set(plan.strides) == {(2, 2, 2)} and set(plan.kernel_sizes) == {
        (3, 3, 3)
    }  # as `Size.unet` has them
    return Size(plan.patch_size, len(plan.normalisation), classes, plan.batch_size, plan.channels)


def test_the_phantoms_are_planned_like_this(tmp_path):
    assert size_of(*planned(tmp_path)) == PHANTOM
    assert size_of(*planned(tmp_path, *LARGE_PATCHES)) == LARGE_PHANTOM


def test_whole_images_are_planned_like_this(tmp_path):
    file = data._medmnist(tmp_path / "squares.npz", 400)
    plan, classes = planned(tmp_path, "data=medmnist", f"data.root={file}")
    assert classes == 2 and (plan.batch_size, 1, *plan.patch_size) == data._PICTURES
    assert {key: getattr(plan, key) for key in data.PLANNED} == data.PLANNED
    assert set(plan.kernel_sizes) == {(3, 3)}
