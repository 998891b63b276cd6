"""Postprocessing from a command line: decided on validation cases, and applied."""

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.cross_validations import by_fold, edit, edit_configs, summaries
from helpers.members import call
from helpers.processes import FORKED

from medconv.config import ConfigError
from medconv.data.io.raster import write_mask, write_picture
from medconv.features.postprocessing import command
from medconv.features.postprocessing.steps import Step, Steps, read
from medconv.features.postprocessing.validated_cases import dataset_of
from medconv.features.sweeps import run
from medconv.inference.inputs import find_cases
from medconv.inference.predictor import Predictor
from medconv.utils.exit_codes import DONE, USER

MSD = "medconv.data.datasets.dataset_json.msd"


def postprocess(monkeypatch, *arguments):
    return tiny.call(monkeypatch, "find-postprocessing", *arguments)


def test_postprocessing_is_decided_on_validation_cases(sweep_folder, monkeypatch, capsys):
    assert postprocess(monkeypatch, "--runs", str(sweep_folder)) == DONE
    output = capsys.readouterr()
    assert "Dice over 7 cases" in output.out
    assert "warning" not in output.out + output.err  # the Dice equals that in training
    assert "keep_largest" in output.out and "steps kept: " in output.out
    best = " ".join(str(path / "checkpoints/best.ckpt") for _, path in sorted(by_fold(sweep_folder).items()))
    assert (
        f"medconv predict --checkpoint {best} --postprocess {sweep_folder}/postprocessing.json --input"
        in output.out
    )
    content = json.loads((sweep_folder / "postprocessing.json").read_text())
    steps = read(sweep_folder / "postprocessing.json")
    assert steps.targets.names == ("box", "hole")
    assert len(content["steps"]) + len(content["rejected"]) >= 9
    assert all(
        {"difference", "low", "high", "p", "before", "after"} <= set(e["evidence"])
        for e in content["rejected"]
    )
    predictions = {path: path.stat().st_mtime_ns for path in sweep_folder.glob("validation/*/*.nii.gz")}
    assert len(predictions) == 7
    for number, summary in summaries(sweep_folder).items():
        cases = sorted(
            p.name.removesuffix(".nii.gz") for p in sweep_folder.glob(f"validation/fold{number}-*/*.nii.gz")
        )
        assert cases == sorted(summary["val/cases"])
    next(iter(predictions)).unlink()
    assert postprocess(monkeypatch, "--runs", str(sweep_folder)) == DONE
    again = {path: path.stat().st_mtime_ns for path in sweep_folder.glob("validation/*/*.nii.gz")}
    assert set(again) == set(predictions)
    assert sum(again[path] == predictions[path] for path in again) == 6  # the others are not predicted again


def test_predictions_of_an_earlier_checkpoint_are_not_reused(sweep_folder, monkeypatch, capsys):
    """A Dice that differs from that in training gives a warning."""
    runs = by_fold(sweep_folder)
    case = next(iter(summaries(sweep_folder)["0"]["val/cases"]))
    stale = sweep_folder / "validation/fold0-00000000"
    stale.mkdir(parents=True)
    nib.save(nib.Nifti1Image(np.zeros((16, 18, 12), np.uint8), np.eye(4)), stale / f"{case}.nii.gz")
    edit(runs["0"] / "summary.json", **{"val/cases": {case: {"box": 0.999, "hole": 0.999}}})
    assert postprocess(monkeypatch, "--runs", str(sweep_folder)) == DONE
    assert not stale.exists()
    assert f"warning: Dice differs from that in training: {case}" in capsys.readouterr().out


def test_a_config_can_neither_run_code_nor_delete_other_folders(sweep_folder, monkeypatch, capsys, tmp_path):
    def fails(reason, *arguments):
        assert postprocess(monkeypatch, "--runs", str(sweep_folder), *arguments) == USER
        error = capsys.readouterr().err
        assert error.count("error:") == 1 and "Traceback" not in error and reason in error

    fails("--device quantum: cannot be used here", "--device", "quantum")
    unchanged = Path(shutil.copytree(sweep_folder, tmp_path / "unchanged"))
    root = next(
        line
        for line in (by_fold(sweep_folder)["0"] / "config.yaml").read_text().splitlines()
        if line.startswith("    root:")
    )
    call = "{_target_: builtins.open, file: " + str(tmp_path / "hit") + ", mode: w}"
    for value, reason in (
        (f"[{call}]", "data.layout.root[0]._target_=builtins.open is refused: a layout takes plain values"),
        (call, "data.layout.root._target_=builtins.open is refused: a layout takes plain values"),
        ("[1]", f"data.layout: {MSD} cannot be called with"),
    ):
        edit_configs(sweep_folder, root, f"    root: {value}")
        fails(reason)
        assert not (tmp_path / "hit").exists()
        shutil.rmtree(sweep_folder)
        shutil.copytree(unchanged, sweep_folder)
    edit_configs(sweep_folder, MSD, "medconv.data.datasets.dataset_json.targets_of")
    edit_configs(sweep_folder, root, root.replace("    root: ", "    root: !!python/name:os.system "))
    fails("not a readable config")
    shutil.rmtree(sweep_folder)
    shutil.copytree(unchanged, sweep_folder)
    precious = tmp_path / "precious"
    for folder in (
        precious,
        sweep_folder / "validation/fold0-notours",
        sweep_folder / "validation/fold0-0123abcd",
    ):
        folder.mkdir(parents=True)
    (sweep_folder / "validation/fold0-00000000").symlink_to(precious)
    assert postprocess(monkeypatch, "--runs", str(sweep_folder)) == DONE
    assert precious.exists() and (sweep_folder / "validation/fold0-notours").exists()
    assert not (sweep_folder / "validation/fold0-0123abcd").exists()


def test_incomplete_cross_validations_are_refused_with_the_reason(
    sweep_folder, monkeypatch, capsys, tmp_path
):
    def fails(*arguments):
        assert postprocess(monkeypatch, *arguments) == USER
        error = capsys.readouterr().err
        assert error.count("error:") == 1 and "Traceback" not in error
        return error

    runs = by_fold(sweep_folder)
    assert "no folds of a cross-validation found" in fails("--runs", str(tmp_path / "nowhere"))
    best = runs["1"] / "checkpoints/best.ckpt"
    best.rename(best.with_suffix(".away"))
    assert f"{best}: no such checkpoint; it is needed to predict fold 1" in fails("--runs", str(sweep_folder))
    best.with_suffix(".away").rename(best)
    edit(runs["1"] / "summary.json", status="failed")
    assert "missing: fold 1 (failed); each must be trained to its end" in fails("--runs", str(sweep_folder))
    edit(runs["1"] / "summary.json", status="done")
    config = runs["0"] / "config.yaml"
    original = config.read_text()
    config.write_text(original.replace(MSD, "os.path.join"))
    error = fails("--runs", str(sweep_folder))  # its config differs from the others
    assert "missing: fold " in error and "; each must" in error
    config.write_text(original)
    edit_configs(sweep_folder, MSD, "os.path.join")
    assert "data.layout._target_=os.path.join is refused" in fails("--runs", str(sweep_folder))
    edit_configs(sweep_folder, "os.path.join", MSD)
    for key, value, words in (
        (
            "annotated",
            "{case_*: [box]}",
            "annotated.case_*=['box']: post-processing is not searched for where cases",
        ),
        (
            "ignore_label",
            "[3, 4]",
            "ignore_label=[3, 4]: post-processing is searched for with one value to ignore",
        ),
        (
            "raters",
            "[labelsTr2]",
            "raters=['labelsTr2']: post-processing is searched for with label maps only",
        ),
        ("soft_labels", "true", "soft_labels=True: post-processing is searched for with label maps only"),
    ):
        edit_configs(sweep_folder, f"  {key}: null", f"  {key}: {value}")
        assert f"data.{words}" in fails("--runs", str(sweep_folder))
        edit_configs(sweep_folder, f"  {key}: {value}", f"  {key}: null")
    lost = {**summaries(sweep_folder)["2"]["val/cases"], "case_99": {"box": 1.0, "hole": 1.0}}
    edit(runs["2"] / "summary.json", **{"val/cases": lost})
    assert "it lacks 1 of 8 cases: case_99" in fails("--runs", str(sweep_folder))
    for number, path in runs.items():
        other = Path(shutil.copytree(path, sweep_folder / f"other{number}")) / "config.yaml"
        other.write_text(other.read_text().replace("seed: 0", "seed: 7"))
    assert "more than one cross-validation there; --select " in fails("--runs", str(sweep_folder))
    assert "none of them is 'seed=8'; --select " in fails("--runs", str(sweep_folder), "--select", "seed=8")


def test_predictions_of_pictures_are_found(tmp_path, monkeypatch, capsys):
    """They are PNG files, unlike those of volumes."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for case in range(4):
        mask = np.zeros((16, 16), np.uint8)
        mask[4:10, 3 + case : 11] = 1
        write_mask(tmp_path / f"masks/{case}.png", mask)
        write_picture(tmp_path / f"images/{case}.png", 100 * mask + case)
    monkeypatch.chdir(tmp_path)
    folders = {"images": "images", "labels": "masks", "cache_dir": "cache"}
    data = [f"data.{key}={tmp_path / folder}" for key, folder in folders.items()]
    small = ["data.num_folds=2", "data.num_workers=0", "trainer.max_steps=2", "plan.size=tiny", "logger=none"]
    small += ["callbacks=none", "data.samples_per_epoch=4", "plan.channels=[4,8]", "data.patch_size=[16,16]"]
    folds = ["-m", "data.fold=0,1", "run.name=pictures", "trainer.accelerator=cpu"]
    monkeypatch.setattr(run, "subprocess", FORKED)
    assert tiny.call(monkeypatch, "train", *folds, "data=image_mask", *data, *small) == DONE
    assert postprocess(monkeypatch, "--runs", "runs/pictures") == DONE
    assert "Dice over 4 cases" in capsys.readouterr().out
    assert len(list(tmp_path.glob("runs/pictures/validation/*/*.png"))) == 4


def test_errors_name_the_options(tmp_path, monkeypatch, capsys):
    runs = tmp_path / "nowhere"
    assert tiny.call(monkeypatch, "find-postprocessing", "--runs", runs) == USER
    assert capsys.readouterr().err.startswith(f"error: --runs {runs}: no folds of a cross-validation found")
    assert tiny.call(monkeypatch, "find-postprocessing", "--runs", runs, "--device", "quantum") == USER
    assert "error: --device quantum: cannot be used here" in capsys.readouterr().err


def test_select_takes_overrides_as_text():
    arguments = "--runs r --select seed=1"
    assert command.parser().parse_args(arguments.split()).select == "seed=1"


@pytest.mark.parametrize("target", ["os.path.join", "medconv.features.joined.layout.joined", None])
def test_a_function_that_is_no_layout_is_refused(target):
    with pytest.raises(ConfigError, match=rf"^data\.layout\._target_={target} is refused"):
        dataset_of({"data": {"layout": {"_target_": target}}}, trusted=["mine"])


def test_a_layout_takes_plain_values_alone():
    layout = {"_target_": "medconv.data.datasets.dataset_json.msd", "root": {"_target_": "os.getcwd"}}
    with pytest.raises(ConfigError, match=r"^data\.layout\.root.*os\.getcwd is refused"):
        dataset_of({"data": {"layout": layout}}, trusted=())


def test_the_layout_of_a_config_may_have_several_channels(tmp_path):
    for name in ("a_t1", "a_t2", "a_seg"):
        nib.save(nib.Nifti1Image(np.ones((4, 4, 4), np.uint8), np.eye(4)), tmp_path / f"{name}.nii.gz")
    images = {name: f"{tmp_path}/{{id}}_{name}.nii.gz" for name in ("t1", "t2")}
    target = "medconv.data.datasets.folder.folder"
    layout = {"_target_": target, "images": images, "labels": f"{tmp_path}/{{id}}_seg.nii.gz"}
    dataset = dataset_of({"data": {"layout": layout}}, [])
    assert dataset.modalities == ("t1", "t2") and [len(case.images) for case in dataset.cases] == [2]


def test_an_argument_of_a_layout_is_named_by_its_key(tmp_path):
    layout = {"_target_": "medconv.data.datasets.folder.folder", "images": {}, "labels": None}
    with pytest.raises(ConfigError, match=r"^data\.images"):
        dataset_of({"data": {"layout": layout}}, trusted=())


def voxels(path):
    return np.asarray(nib.load(path).dataobj)


def test_postprocessing_is_applied_and_recorded(exported, tmp_path, monkeypatch, capsys):
    images, checkpoint, _ = exported
    predictor = Predictor.load([checkpoint])
    steps = Steps((Step("remove_small", "box", 1e6),), predictor.targets)
    (file := tmp_path / "steps.json").write_text(
        json.dumps({"targets": predictor.targets.plain(), "steps": [step.plain() for step in steps.steps]})
    )
    path, output = images / "case_0.nii.gz", tmp_path / "out"
    assert call(monkeypatch, checkpoint, path, "--output", output, "--postprocess", file) == 0
    plain, grid = predictor(path), predictor.read(find_cases(path, 1)[0]).crops[0].grid
    processed = steps.apply(plain, grid, predictor.targets)
    np.testing.assert_array_equal(voxels(output / path.name), processed)
    assert (processed != plain).any()
    assert call(monkeypatch, checkpoint, path, "--output", output) == 1
    assert "another post-processing, or none" in capsys.readouterr().err
