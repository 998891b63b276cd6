"""medconv/training/data_setup.py: the dataset of a config, its loaders and its sampler."""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.loading import cases_of, training_cases
from helpers.picture_tables import checked, write
from helpers.volumes import tiny as tiny_volumes

from medconv import config
from medconv.config import ConfigError, DataConfig, RunConfig
from medconv.data.io.raster import write_picture
from medconv.data.loading.samplers import BalancedPatchSampler, ForegroundSampler, Sampler
from medconv.data.preprocessing import compressed
from medconv.data.splits import DataSplit
from medconv.features.image_level.samples import BalancedImageSampler
from medconv.training import data_setup, run
from medconv.training.data_setup import build_data, prepare_data
from medconv.training.run_dir import RunDir


@pytest.mark.parametrize(
    ("sizes", "overrides", "message"),
    [
        (
            {"_3": (9, 9)},
            [],
            r"3\.png: 9 x 9 pixels, while most pictures have 12 x 8; expected one size; "
            r"data\.resize=\[12,8\], for example, scales all of them to it",
        ),
        (
            {**{f"_{i}": (1200, 30) for i in range(10)}, "_3": (9, 9)},
            [],
            r"most pictures have 1200 x 30; expected one size; data\.resize=\[512,13\]",
        ),
        ({}, ["data.regions={x:[1]}"], r"data\.regions is for label maps"),
        ({}, ["data.flip_label_pairs=[[a,b]]"], r"data\.flip_label_pairs exchanges classes of label maps"),
        (
            {},
            ["data.balanced_sampling=true", "data.target_type=regression", "data.label_columns=age"],
            r"data\.balanced_sampling=true, as sampler=balanced, draws each class",
        ),
        ({}, ["data.num_folds=10"], "no validation case has class"),
        ({}, ["data.missing=allow"], r"data\.missing=allow: networks of whole images do not learn"),
    ],
)
def test_invalid_settings_are_errors(tmp_path, sizes, overrides, message):
    with pytest.raises(ValueError, match=message):
        data_setup.prepare_data(checked(write(tmp_path / "data", **sizes), *overrides))


def test_a_fold_keeps_a_case_to_train_on_and_one_to_validate(tmp_path):
    """Of two cases in two folds one is invalid, which is skipped; or none is left for training."""
    dataset = tiny.write_dataset(tmp_path / "data", 2)
    settings = ["data.num_folds=2", "data.on_invalid_case=skip", f"data.cache_dir={tmp_path}/cache"]
    (dataset / "imagesTr/case_1.nii.gz").write_bytes(b"")
    messages = set()
    for fold in (0, 1):
        with pytest.raises(ConfigError, match=f"data.fold={fold}: no case is left to") as error:
            prepare_data(tiny.checked(dataset, *settings, f"data.fold={fold}"))
        messages.add(str(error.value).split(": ")[1])
    assert len(messages) == 2
    (tmp_path / "splits.json").write_text('[{"train": [], "val": ["case_0"]}]')
    with pytest.raises(ConfigError, match="no case to train on"):
        more = ["data.splits_file=" + str(tmp_path / "splits.json"), "data.on_invalid_case=raise"]
        tiny_volumes(tmp_path / "valid", 2)
        prepare_data(tiny.checked(tmp_path / "valid", *settings, *more))


def test_axes_as_stored_need_a_plan_of_their_own(tmp_path):
    """Spacing and patch are planned for axes from right to left, back to front, bottom to top."""
    root = tiny.write_dataset(tmp_path / "data", 3)
    for path in root.glob("*Tr/*.nii.gz"):
        image = nib.load(path)
        turned = nib.orientations.axcodes2ornt("PIR")
        change = nib.orientations.ornt_transform(nib.io_orientation(image.affine), turned)
        nib.save(image.as_reoriented(change), path)
    settings = ["data.convention=nnunet", f"data.cache_dir={tmp_path}/cache"]
    with pytest.raises(ConfigError, match=r"here PIR \(.*case_\d\.nii\.gz\), but a plan has them"):
        prepare_data(tiny.checked(root, *settings))
    sizes = ["data.spacing_mm=[1,1,1]", "data.patch_size=[8,8,8]"]
    assert prepare_data(tiny.checked(root, *settings, *sizes)).plan.patch_size == (8, 8, 8)


def test_no_stated_spacing_is_as_none(dataset, tmp_path):
    settings = ["data.source_spacing_mm={}", f"data.cache_dir={tmp_path}"]
    assert not prepare_data(tiny.checked(dataset, *settings)).source_spacing_mm


def test_folds_of_different_sizes_have_epochs_of_one_length(tmp_path):
    """Else the fifth of five folds would have another config, and count for another cross-validation."""
    table = write(tmp_path / "data", 505)
    lengths = set()
    for fold in (0, 1):
        settings = checked(table, f"data.fold={fold}", "data.prepare_workers=1")
        prepared = prepare_data(settings)
        resolved = run.resolve(settings, prepared, RunDir(tmp_path / "run"))
        lengths.add((len(prepared.train), resolved.data.samples_per_epoch))
    assert lengths == {(252, 2525), (253, 2525)}


def test_resize_scales_pictures_of_different_sizes(tmp_path):
    table = write(tmp_path / "data", 20, _3=(9, 30))
    prepared = data_setup.prepare_data(checked(table, "data.resize=[16,8]"))
    assert prepared.preprocessing.resize == (16, 8) and prepared.plan.patch_size == (16, 8)
    assert all(prepared.store.read(case.id).image.shape == (1, 16, 8) for case in prepared.dataset.cases)


def test_pictures_too_large_for_memory_are_prepared_on_a_coarser_grid(tmp_path):
    sizes = {f"_{i}": (96, 80) for i in range(20)}
    prepared = data_setup.prepare_data(checked(write(tmp_path / "data", 20, **sizes), "plan.memory_gb=0.05"))
    edges = prepared.plan.patch_size
    assert all(edge < 80 for edge in edges) and prepared.plan.spacing_mm[0] > 1
    assert all(prepared.store.read(case.id).image.shape == (1, *edges) for case in prepared.dataset.cases)


def test_a_value_to_ignore_of_255_is_refused_for_pictures(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        write_picture(tmp_path / folder / "a.png", np.eye(8, dtype=np.uint8))
    arguments = ["data=image_mask", f"data.images={tmp_path}/images", f"data.labels={tmp_path}/masks"]
    data = config.data_of(tiny.composed(*arguments, "data.ignore_label=255"))
    with pytest.raises(ValueError, match=r"a\.png: the value to ignore must be below 100"):
        data_setup.find_data(data)


def test_pictures_of_a_rare_kind_get_a_weight_unless_weights_are_set(tmp_path, caplog):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    mask = np.zeros((16, 16), np.uint8)
    mask[4:9, 4:9] = 1
    for i in range(20):
        is_bright = i % 5 == 0
        noise = np.random.default_rng(i).integers(0, 20, mask.shape, dtype=np.uint8)
        write_picture(tmp_path / "images" / f"{i:02}.png", 230 - noise if is_bright else noise)
        write_picture(tmp_path / "masks" / f"{i:02}.png", mask)
    arguments = ["data=image_mask", f"data.images={tmp_path}/images", f"data.labels={tmp_path}/masks"]
    arguments += [f"data.cache_dir={tmp_path}/cache", "data.patch_size=[16,16]", "data.prepare_workers=1"]
    caplog.set_level("INFO")

    def weights(*more):
        prepared = data_setup.prepare_data(config.validate(tiny.composed(*arguments, *more)))
        weights = [{case.weight for case in cases} for cases in (prepared.train, prepared.val)]
        return *weights, prepared.derived.batch_dice

    train, val, batch_dice = weights()
    assert train == {1, 2} and val <= train and not batch_dice
    assert re.search(
        r"pictures of 2 kinds \(16 grey, brightness 0\.0\d; 4 grey, brightness 0\.9", caplog.text
    )
    for override in ("data.case_weights={}", "data.balanced_sampling=true", "sampler=uniform"):
        train, _, batch_dice = weights(override)
        assert train == {1} and not batch_dice
    assert weights("sampler=foreground", "data.oversample_foreground=0.5")[0] == {1, 2}


def test_a_compressed_store_needs_its_package(dataset, tmp_path, monkeypatch):
    """Said before a file is read."""
    monkeypatch.setitem(sys.modules, "blosc2", None)
    compressed.blosc2.cache_clear()
    run_config = tiny.checked(dataset, f"data.cache_dir={tmp_path}", "data.store=blosc2")
    message = r"^data\.store=blosc2 needs the package blosc2: pip install 'medconv\[blosc2\]'$"
    with pytest.raises(ValueError, match=message):
        data_setup.find_data(run_config.data)


def test_loaders_have_the_settings_of_the_config(tmp_path):
    settings = checked(write(tmp_path / "data", 20), "data.batch_size=3", "data.samples_per_epoch=20")
    prepared = prepare_data(settings)
    module = build_data(config.with_derived(settings, prepared.derived), prepared)
    assert next(iter(module.train_dataloader()))["image"].shape[0] == 3
    assert [case.id for case in module.split.val] == [case.id for case in prepared.val]


def test_channels_are_left_out_only_where_they_may_be_missing(tmp_path):
    settings = checked(
        write(tmp_path / "data", 20),
        "data.batch_size=3",
        "data.samples_per_epoch=20",
        "data.channel_dropout=0.5",
    )
    prepared = prepare_data(settings)
    with pytest.raises(ConfigError, match="data.channel_dropout=0.5 needs data.missing=allow"):
        build_data(config.with_derived(settings, prepared.derived), prepared)


ALIKE = cases_of(("a", "b", "c"))
WEIGHTED = cases_of(("a", "b", "c"), [1, 1, 4])
PATCHES = training_cases(ALIKE, (2, 2), class_indices=[[0], [1, 2]])
IMAGES = training_cases(ALIKE, class_indices=[[0], [1, 2]])


class FirstCase(Sampler):
    """A sampler of a user's own."""

    def case_index(self, sample: int) -> int:
        return 0


class NoSampler:
    def __init__(self, cases: Any) -> None:
        pass


@cache
def composed(*overrides: str) -> RunConfig:
    """With the interpolations of `sampler` replaced, as `resolve` does."""
    values = tiny.composed(*overrides, "data=msd", "data.root=.")
    checked = config.validate(values)
    sampler = values.sampler
    return replace(checked, sampler={str(key): sampler[key] for key in sampler})


def built(*overrides, cases=PATCHES):
    settings = composed(*overrides)
    return data_setup.build_sampler(settings.sampler, settings.data, cases)


def draws(sampler):
    return [sampler.case_index(n) for n in range(40)]


@pytest.mark.parametrize(
    ("overrides", "kind", "share"),
    [
        ([], ForegroundSampler, 0.33),
        (["data.oversample_foreground=0.5"], ForegroundSampler, 0.5),
        (["data.balanced_sampling=true"], BalancedPatchSampler, 0.33),
        (["sampler=foreground"], ForegroundSampler, 0.33),
        (["sampler=foreground", "data.oversample_foreground=0.5"], ForegroundSampler, 0.5),
        (["sampler=foreground", "sampler.foreground_share=0.2"], ForegroundSampler, 0.2),
        (["sampler=balanced", "data.oversample_foreground=1"], BalancedPatchSampler, 1),
        (["sampler=balanced", "data.balanced_sampling=true"], BalancedPatchSampler, 0.33),
        (["sampler=uniform"], ForegroundSampler, 0),
        ([f"sampler._target_={__name__}.FirstCase"], FirstCase, 0),
    ],
)
def test_options_and_keys_choose_the_sampler(overrides, kind, share):
    sampler = built(*overrides)
    assert type(sampler) is kind and sampler.foreground_share == share


def test_options_and_keys_for_the_same_draw_the_same():
    weighted = training_cases(WEIGHTED, (2, 2), class_indices=[[0], [1, 2]])
    for cases in (PATCHES, weighted):
        assert draws(built("sampler=foreground", cases=cases)) == draws(built(cases=cases))
        by_key = built("data.balanced_sampling=true", cases=cases)
        assert draws(built("sampler=balanced", cases=cases)) == draws(by_key)
    assert draws(built("sampler=weighted", cases=weighted)) == draws(built(cases=weighted))
    assert draws(built("sampler=uniform")) == draws(built())


def test_whole_images_have_samplers_too(caplog):
    caplog.set_level("INFO")
    assert type(built("sampler=balanced", cases=IMAGES)) is BalancedImageSampler
    assert type(built("data.balanced_sampling=true", cases=IMAGES)) is BalancedImageSampler
    assert draws(built("sampler=uniform", cases=IMAGES)) == draws(built(cases=IMAGES))
    assert not caplog.text
    built("data.oversample_foreground=0.7", cases=IMAGES)
    assert "data.oversample_foreground has no effect" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "cases", "message"),
    [
        (["data.oversample_foreground=2"], ALIKE, r"data\.oversample_foreground must be .* 1, got 2"),
        (["data.oversample_foreground=-0.1"], ALIKE, r"data\.oversample_foreground must be .*got -0\.1"),
        (["data.oversample_foreground=nan"], ALIKE, r"data\.oversample_foreground must be .* 1, got nan"),
        (["sampler=foreground", "sampler.foreground_share=2"], ALIKE, "^sampler: foreground_share must lie"),
        (
            ["sampler=foreground", "data.balanced_sampling=true"],
            ALIKE,
            "balanced_sampling=true has no effect",
        ),
        (["sampler=uniform", "data.oversample_foreground=0.5"], ALIKE, "foreground=0.5 has no effect with"),
        (
            [f"sampler._target_={__name__}.FirstCase", "data.oversample_foreground=0.5"],
            ALIKE,
            r"has no effect with sampler\._target_=\S+FirstCase, whose foreground_share is 0; set only one",
        ),
        (["sampler=weighted"], ALIKE, "^sampler: by_weight=true needs case weights that differ"),
        (["sampler=uniform"], WEIGHTED, "^sampler: by_weight=false draws each case equally often"),
        ([f"sampler._target_={__name__}.NoSampler"], ALIKE, r"NoSampler must make a medconv\S+\.Sampler"),
        ([f"sampler._target_={__name__}.FirstCase", "+sampler.x=1"], ALIKE, "sampler: .* cannot be built"),
    ],
)
def test_what_contradicts_itself_is_an_error(overrides, cases, message):
    with pytest.raises(ConfigError, match=message):
        built(*overrides, cases=training_cases(cases, (2, 2)))


def test_a_fold_without_foreground_to_validate_gets_a_word(tmp_path, caplog):
    root = tiny.write_dataset(tmp_path / "data", cases=6)
    settings = config.validate(tiny.composed(*tiny.overrides(root), f"data.cache_dir={tmp_path / 'cache'}"))
    found = data_setup.split_cases(data_setup.find_data(settings.data), settings.data)
    for case in found.val:
        image = nib.load(case.label)
        nib.save(nib.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine), case.label)
    prepare_data(settings)
    assert "no validation case has foreground, so that Dice cannot tell" in caplog.text
    caplog.clear()
    prepare_data(checked(write(tmp_path / "pictures", 20)))
    assert "no validation case has foreground" not in caplog.text
    assert "no training case has a voxel" not in caplog.text


def test_a_class_that_no_training_case_of_the_fold_has_is_named(tmp_path, caplog):
    root = tiny.write_dataset(tmp_path / "data", cases=6)
    settings = config.validate(tiny.composed(*tiny.overrides(root), f"data.cache_dir={tmp_path / 'cache'}"))
    dataset = data_setup.find_data(settings.data)
    for case in data_setup.split_cases(dataset, settings.data).train:
        image = nib.load(case.label)
        label = np.asarray(image.dataobj)
        nib.save(nib.Nifti1Image(np.where(label == 1, 0, label), image.affine), case.label)
    prepare_data(settings)
    first, second = dataset.class_names[1:3]
    assert f"no training case has a voxel of {first}, which only cases" in caplog.text
    caplog.clear()
    regions = f"data.regions={{both: [{first}, {second}], one: [{first}]}}"
    settings = (regions, "data.regions_order=[2,1]", f"data.cache_dir={tmp_path}")
    prepare_data(config.validate(tiny.composed(*tiny.overrides(root), *settings)))
    assert "no training case has a voxel of one, which only cases" in caplog.text  # both is learned
    caplog.clear()
    for case in dataset.cases:  # none has it any more
        image = nib.load(case.label)
        label = np.asarray(image.dataobj)
        nib.save(nib.Nifti1Image(np.where(label == 1, 0, label), image.affine), case.label)
    prepare_data(config.validate(tiny.composed(*tiny.overrides(root), f"data.cache_dir={tmp_path / 'none'}")))
    assert "no training case has a voxel" not in caplog.text


def test_a_splits_file_is_not_doubted():
    split = DataSplit(list(cases_of(("p1_f0", "p2_f0"))), list(cases_of(("p1_f1", "p2_f1"))), [])
    assert "if they are of one patient" in (data_setup.split_warning(split, DataConfig()) or "")
    assert data_setup.split_warning(split, DataConfig(splits_file="splits.json")) is None


def test_all_voxels_of_a_case_are_one_view_and_a_patch_is_at_least_one(tmp_path):
    prepared = prepare_data(tiny.checked(tiny.write_dataset(tmp_path / "data", 4)))
    voxels = [prod(prepared.store.read(case.id).image.shape[1:]) for case in prepared.train]
    for edge, patches_per_view in ((2, sum(voxels) / 8), (500, len(voxels))):
        plan = replace(prepared.plan, patch_size=(edge,) * 3)
        assert replace(prepared, plan=plan).views(60) == pytest.approx(60 / patches_per_view)


def test_a_number_of_folds_that_nothing_divides_is_named(tmp_path, caplog):
    root = tiny.write_dataset(tmp_path / "data", cases=4)
    splits = tmp_path / "splits.json"
    names = [case.id for case in data_setup.find_data(tiny.checked(root).data).cases]
    splits.write_text(json.dumps([{"train": names[:3], "val": names[3:]}]))
    for overrides, reason in (
        ((f"data.splits_file={splits}",), f"data.num_folds=3 has no effect: {splits} has the folds"),
        (("data.fold=all",), "data.num_folds=3 has no effect: data.fold=all trains on every case"),
        ((), None),
    ):
        caplog.clear()
        prepare_data(tiny.checked(root, "data.num_folds=3", *overrides))
        assert reason in caplog.messages if reason else "has no effect" not in caplog.text


def test_differences_between_cases_are_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    dataset = tiny_volumes(tmp_path)
    data_setup.log_annotated_and_weights(dataset.cases, dataset)
    assert not caplog.text
    first, *others = dataset.cases
    data_setup.log_annotated_and_weights([replace(first, annotated=(2,), weight=2.5), *others], dataset)
    assert "training cases that annotate a class, of 3: big in 2, small in 3" in caplog.text
    assert "training cases are drawn by weight: 1 of 2, 2.5 of 1" in caplog.text
