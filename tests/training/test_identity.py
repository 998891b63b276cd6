"""medconv/training/identity.py: which keys and data may change when a run resumes."""

import os
import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny

from medconv.config import ConfigError
from medconv.config.schema import RunConfig
from medconv.training import identity
from medconv.training.data_setup import prepare_data
from medconv.training.identity import config_differences


def test_changes_are_named_by_case(tmp_path):
    prepared = prepare_data(tiny.checked(tiny.write_dataset(tmp_path / "data", 4)))
    first, second, third, fourth = prepared.dataset.cases

    def of(train, val):
        return replace(prepared, train=train, val=val).identity

    before = of([first, second], [third])
    assert identity.data_differences(before, of([second, first], [third])) == []
    for other in ({"weight": 2.0}, {"annotated": (1,)}, {"values": (1.0,)}):
        changed = of([first, replace(second, **other)], [third])
        assert identity.data_differences(before, changed) == [
            f"other image, label, values or weight: {second.id}"
        ]
    assert identity.data_differences(before, of([first, third], [second, fourth])) == [
        f"no longer trained on: {second.id}",
        f"now trained on: {third.id}",
        f"no longer validated: {third.id}",
        f"now validated: {second.id}, {fourth.id}",
    ]


def test_cases_that_another_run_trained_on_are_named_where_they_are_validated():
    earlier = {"train": {"a": 1, "b": 1}, "val": {"c": 1}}
    assert identity.leaks(earlier, {"train": {"a": 1, "c": 1}, "val": {"b": 2}}) == ["b"]
    assert identity.leaks(earlier, earlier) == []


@pytest.mark.parametrize(
    ("same_root", "digest", "is_named"), [(True, 2, True), (False, 1, True), (False, 2, False)]
)
def test_pretrained_weights_that_saw_a_case_are_named(same_root, digest, is_named, tmp_path, caplog):
    """A case of another dataset may have the same name."""
    (tmp_path / identity.CASES_FILE).write_text('{"train": {"a": 1, "b": 5}, "val": {"c": 1}}')
    weights = tmp_path / "checkpoints" / "best.ckpt"
    current = {"train": {"b": 5, "c": 1}, "val": {"a": digest}}
    identity.warn_of_seen_cases(weights, current, same_root)
    expected = f"init.pretrained={weights}: trained on cases that are validated now"
    assert (expected in caplog.text) == is_named
    identity.warn_of_seen_cases(tmp_path / "other" / "checkpoints" / "best.ckpt", current, same_root)
    assert len(caplog.records) == is_named


def test_only_the_first_cases_are_named():
    many = {f"case_{number}": number for number in range(9)}
    (line,) = identity.data_differences({"train": many, "val": {}}, {"train": {}, "val": {}})
    assert line.endswith("case_3, case_4 and 4 more")


@pytest.mark.parametrize("content", [None, "", "[]", '{"train": 1, "val": {}}'])
def test_a_file_that_cannot_be_read_compares_with_nothing(tmp_path, content):
    """Runs of earlier versions have none."""
    if content is not None:
        (tmp_path / identity.CASES_FILE).write_text(content)
    assert identity.read_data_identity(tmp_path) is None


def change(dataset, name):
    """Another image of the same shape."""
    path = dataset / f"imagesTr/{name}.nii.gz"
    image = nib.load(path)
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj)[::-1].copy(), image.affine), path)


def test_a_stopped_or_finished_run_refuses_other_images(dataset, tmp_path, caplog):
    data = shutil.copytree(dataset, tmp_path / "data")
    folder = tmp_path / "run"
    tiny.train(data, folder)
    trained = (folder / "checkpoints/last.ckpt").read_bytes()
    os.utime(data / "imagesTr/case_1.nii.gz", (1, 1))  # a time alone is no change
    assert tiny.train(data, folder)["status"] == "done"
    change(data, "case_1")
    expected = r"other data.*run\.resume=never\n  other image, label, values or weight: case_1$"
    with pytest.raises(ConfigError, match=expected):
        tiny.train(data, folder)
    assert (folder / "checkpoints/last.ckpt").read_bytes() == trained
    resume = f"run.resume={folder / 'checkpoints/last.ckpt'}"
    assert tiny.train(data, tmp_path / "new", resume, "trainer.max_steps=5")["status"] == "done"
    assert "its run had other data: other image, label, values or weight: case_1" in caplog.text
    assert "trained on cases that are validated now" not in caplog.text


def test_data_that_was_moved_is_the_same_data(dataset, tmp_path):
    """Also where relative paths and the cache are others; another image there is not."""
    folder = tmp_path / "run"
    tiny.train(shutil.copytree(dataset, tmp_path / "data"), folder)
    moved = shutil.move(tmp_path / "data", tmp_path / "elsewhere/data")
    assert tiny.train(moved, folder)["status"] == "done"
    change(moved, "case_1")
    with pytest.raises(ConfigError, match=r"other data.*\n  other image, label, values or weight: case_1$"):
        tiny.train(moved, folder)


def test_keys_that_change_what_is_trained_are_named():
    config = RunConfig()
    same = replace(config, data=replace(config.data, num_workers=3, store="blosc2"), tags=["x"])
    other = replace(same, seed=7)
    assert config_differences(config.plain(), same.plain()) == []
    assert config_differences(config.plain(), other.plain()) == [f"seed: {config.seed} there, 7 now"]


def test_keys_of_another_version_of_lightning_do_not_count():
    earlier = {"seed": 0, "trainer": {"precision": "32-true", "gone": True}}
    now = {"seed": 0, "trainer": {"precision": "32-true", "new": True}}
    assert config_differences(earlier, now) == []
    other = {"seed": 0, "trainer": {"precision": "16-mixed"}}
    assert config_differences(earlier, other) == ["trainer.precision: 32-true there, 16-mixed now"]


def test_a_run_resumes_with_other_loggers_and_callbacks():
    """Also with none, whose group is empty."""
    tensorboard = {"tensorboard": {"_target_": "x"}}
    plain = [replace(RunConfig(), logger=node, callbacks=node).plain() for node in (tensorboard, {})]
    assert config_differences(*plain) == config_differences(*reversed(plain)) == []


def test_a_callback_that_changes_the_steps_is_compared():
    def of(factor):
        callback = {"_target_": "lightning.pytorch.callbacks.GradientAccumulationScheduler"}
        return replace(RunConfig(), callbacks={"acc": {**callback, "scheduling": {"0": factor}}}).plain()

    assert config_differences(of(2), of(2)) == []
    assert config_differences(of(2), of(4)) == ["callbacks.acc.scheduling.0: 2 there, 4 now"]
    assert len(config_differences(of(2), RunConfig().plain())) == 2


def test_a_key_that_earlier_versions_lacked_has_the_value_that_they_used():
    now = {"trainer": {}, "derived": {"batch_dice": True}, "loss": {"batch_dice": True}}
    assert identity.config_differences({"trainer": {}}, now) == []
    of_kinds = {"trainer": {}, "derived": {"batch_dice": False}, "loss": {"batch_dice": False}}
    assert identity.config_differences({"trainer": {}}, of_kinds) == [
        "derived.batch_dice: true there, false now",
        "loss.batch_dice: true there, false now",
    ]
