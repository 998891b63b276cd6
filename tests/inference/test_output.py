"""An output folder of either kind: which results may stay beside new ones, resuming, the manifest."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.members import refused

from medconv.data.case import Case
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.output import OutputTable
from medconv.inference.output import MANIFEST, Output, OutputDir

Make = Callable[..., Output]


def label_maps(path, **settings):
    return OutputDir(path, {"overlap": 0.5, **settings}, {"class_names": ["background", "box"]})


def table(path, **settings):
    targets = MulticlassTargets(("benign", "case"))
    return OutputTable(path, targets, {"overlap": 0.5, **settings}, {"class_names": ["background", "box"]})


@pytest.fixture(params=[label_maps, table])
def output(request):
    return request.param


def cases(*names, root="images"):
    return [Case(name, (Path(root).absolute() / f"{name}.nii.gz",)) for name in names]


def put(output, case, value=0.25):
    if isinstance(output, OutputTable):
        output.add(case, np.array([value, 1 - value]))
    else:
        output.label(case.id).write_text(str(value))


def fill(output, listed, overwrite=False):
    """Predict all cases that are free; returns their names."""
    done = []
    with output.open(listed, overwrite):
        for case, release in output.claims(listed):
            put(output, case)
            done.append(case.id)
            release()
    return done


def manifest(path):
    return json.loads((path / MANIFEST).read_text())


def test_finished_cases_are_skipped(output, tmp_path):
    assert fill(output(tmp_path), cases("a", "b")) == ["a", "b"]
    again = output(tmp_path)
    assert fill(again, cases("a", "b", "c")) == ["c"]
    assert again.skipped == ["a", "b"] and again.claimed_by_others == []
    assert {path.name for path in tmp_path.glob(".*")} == {".lock"}
    content = manifest(tmp_path)
    assert content["class_names"] == ["background", "box"] and list(content["cases"]) == ["a", "b", "c"]
    assert content["cases"]["b"]["images"] == [str(Path("images/b.nii.gz").absolute())]
    assert content["settings"] == again.settings and content["overwriting"] == []


def test_other_settings_need_overwrite_and_the_same_cases(output, tmp_path):
    fill(output(tmp_path), cases("a", "b"))
    differs = r"^output \S+: holds results made with other settings \(overlap: 0\.5 there, 0\.25 now\); "
    with refused(differs + "take another folder, or overwrite=True"):
        fill(output(tmp_path, overlap=0.25), cases("a", "b"))
    with refused(
        "to overwrite would keep results made with other settings, .* not in the input: b; take another"
    ):
        fill(output(tmp_path, overlap=0.25), cases("a"), overwrite=True)
    assert manifest(tmp_path)["settings"]["overlap"] == 0.5 and fill(output(tmp_path), cases("a", "b")) == []
    assert fill(output(tmp_path, overlap=0.25), cases("a", "b"), overwrite=True) == ["a", "b"]
    assert manifest(tmp_path)["settings"]["overlap"] == 0.25
    assert fill(output(tmp_path, overlap=0.25), cases("b"), overwrite=True) == ["b"]
    assert list(manifest(tmp_path)["cases"]) == ["a", "b"]


def test_two_images_with_one_case_id_are_refused(output, tmp_path):
    fill(output(tmp_path), cases("a", "b"))
    with refused(
        r"holds case a predicted from another image, \S+/images/a\.nii\.gz, not \S+/elsewhere/a\.nii\.gz"
    ):
        fill(output(tmp_path), cases("a", "c", root="elsewhere"))


def test_a_replaced_image_is_refused_without_overwrite(output, tmp_path):
    (tmp_path / "a.nii.gz").write_text("image")
    listed, out = cases("a", root=str(tmp_path)), tmp_path / "out"
    assert fill(output(out), listed) == ["a"] and fill(output(out), listed) == []
    (tmp_path / "a.nii.gz").write_text("another")
    with refused(
        r"holds case a predicted from an image that has changed since: .*a\.nii\.gz; take another .* overwrite=True"
    ):
        fill(output(out), listed)
    assert fill(output(out), listed, overwrite=True) == ["a"]


def test_a_stopped_overwrite_resumes(output, tmp_path):
    listed = cases("a", "b", "c")
    fill(output(tmp_path), cases("a", "b", "c", "d"))
    stopped = output(tmp_path)
    with pytest.raises(KeyboardInterrupt), stopped.open(listed, overwrite=True):
        case, release = next(stopped.claims(listed))
        put(stopped, case, 0.5)
        release()
        raise KeyboardInterrupt
    # The stopped command was to replace it, and has not.
    assert fill(output(tmp_path), cases("b"), overwrite=True) == ["b"]
    assert manifest(tmp_path)["overwriting"] == []
    with pytest.raises(KeyboardInterrupt), stopped.open(listed, overwrite=True):
        put(stopped, listed[0], 0.75)
        raise KeyboardInterrupt
    assert fill(output(tmp_path), [*listed, *cases("d")], overwrite=True) == ["b", "c", "d"]
    kept = stopped.target.read_text() if stopped.target.is_file() else (tmp_path / "a.nii.gz").read_text()
    assert "0.75" in kept
    # The overwriting command has finished, so this is a new one.
    assert fill(output(tmp_path), listed, overwrite=True) == ["a", "b", "c"]


def test_results_of_the_other_kind_are_refused(output, tmp_path):
    other = table if output is label_maps else label_maps
    fill(other(tmp_path), cases("a"))
    with refused(r"^output \S+: holds (label maps|predictions\.csv); take another folder"):
        fill(output(tmp_path), cases("a"), overwrite=True)
    assert fill(other(tmp_path), cases("a")) == []


def test_a_folder_that_cannot_be_made_is_an_error(output, tmp_path):
    (tmp_path / "file").write_text("")
    with refused(r"^output \S+/file: cannot be written \(File exists\)"):
        fill(output(tmp_path / "file"), cases("a"))
