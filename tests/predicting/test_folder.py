"""medconv/predicting/folder.py: who does which case, what may stay beside new results, and what a record says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import members
import pytest

from medconv.data.case import Case
from medconv.predicting.folder import RECORD, Folder


def cases(*names: str, root: str = "images") -> list[Case]:
    return [Case(name, (Path(root).absolute() / f"{name}.nii.gz",)) for name in names]


def folder(path: Path, probabilities: bool = False, **settings: Any) -> Folder:
    return Folder(path, {"overlap": 0.5, **settings}, {"class_names": ["background", "box"]}, probabilities)


def fill(work: Folder, found: Sequence[Case], overwrite: bool = False) -> list[str]:
    """Do all cases that are free; returns their names."""
    done = []
    with work.open(found, overwrite):
        for case, release in work.claims(found):
            work.label(case.id).write_text("".join(sorted(map(str, work.settings.values()))))
            done.append(case.id)
            release()
    return done


def record(path: Path) -> dict[str, Any]:
    return json.loads((path / RECORD).read_text())


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    assert fill(folder(tmp_path), cases("a", "b")) == ["a", "b"]
    again = folder(tmp_path)
    assert fill(again, cases("a", "b", "c")) == ["c"]
    assert again.skipped == ["a", "b"] and again.elsewhere == []
    assert {p.name for p in tmp_path.iterdir()} == {"a.nii.gz", "b.nii.gz", "c.nii.gz", RECORD, ".lock"}
    content = record(tmp_path)
    assert content["class_names"] == ["background", "box"] and list(content["cases"]) == ["a", "b", "c"]
    assert content["cases"]["b"]["images"] == [str(Path("images/b.nii.gz").absolute())]
    assert content["settings"] == {"overlap": 0.5, "probabilities": False}


def test_processes_share_the_cases(tmp_path: Path) -> None:
    """Two, step by step: each case once, and the record holds the cases of both."""
    one, two = folder(tmp_path), folder(tmp_path)
    first, second = cases("a", "b", "c"), cases("b", "c", "d")
    with one.open(first):
        mine = one.claims(first)
        case, release = next(mine)
        assert case.id == "a"
        with two.open(second):
            theirs = two.claims(second)
            assert next(theirs)[0].id == "b"
            assert next(mine)[0].id == "c"
            assert next(theirs)[0].id == "d"
            assert list(theirs) == [] and two.elsewhere == ["c"] and two.skipped == []
            one.label("a").write_text("done")
            release()
        assert (tmp_path / ".claims").is_dir()  # the first is still at work
        two.label("b").write_text("done")
        assert list(mine) == [] and one.skipped == ["b"] and one.elsewhere == []
    assert list(record(tmp_path)["cases"]) == ["a", "b", "c", "d"]
    assert not (tmp_path / ".claims").exists()


def test_a_case_that_failed_or_was_left_is_free_again(tmp_path: Path) -> None:
    one, two = folder(tmp_path), folder(tmp_path)
    with one.open(cases("a", "b")), two.open(cases("a", "b")):
        mine, theirs = one.claims(cases("a", "b")), two.claims(cases("a", "b"))
        _, release = next(mine)
        assert next(theirs)[0].id == "b"
        release()
        assert next(theirs)[0].id == "a"  # tried again at the end


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    fill(folder(tmp_path), cases("a", "b"))
    changed = r"^--output \S+: holds results that were made otherwise \(overlap: 0\.5 there, 0\.25 now\); .* --overwrite"
    with members.refused(changed):
        fill(folder(tmp_path, overlap=0.25), cases("a", "b"))
    with members.refused("probabilities: False there, True now"):
        fill(folder(tmp_path, probabilities=True), cases("a"))
    assert record(tmp_path)["settings"]["overlap"] == 0.5
    assert fill(folder(tmp_path), cases("a", "b")) == []


def test_overwrite_replaces_all(tmp_path: Path) -> None:
    fill(folder(tmp_path), cases("a", "b"))
    assert fill(folder(tmp_path), cases("a", "b"), overwrite=True) == ["a", "b"]
    assert fill(folder(tmp_path, overlap=0.25), cases("a", "b"), overwrite=True) == ["a", "b"]
    assert record(tmp_path)["settings"]["overlap"] == 0.25
    assert (tmp_path / "a.nii.gz").read_text() == "0.25False"
    assert fill(folder(tmp_path, overlap=0.25), cases("b"), overwrite=True) == ["b"]
    assert list(record(tmp_path)["cases"]) == ["a", "b"]


def test_overwrite_leaves_no_result_of_other_settings_behind(tmp_path: Path) -> None:
    fill(folder(tmp_path), cases("a", "b"))
    with members.refused("--overwrite would leave results there that were made otherwise.*does not name: b; take another"):
        fill(folder(tmp_path, overlap=0.25), cases("a"), overwrite=True)
    assert (tmp_path / "a.nii.gz").is_file()
    with folder(tmp_path, overlap=0.25).open(cases("a", "b"), overwrite=True):
        assert not (tmp_path / "a.nii.gz").exists()  # a case that now fails leaves none


def test_results_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    (tmp_path / "z.nii.gz").write_text("")
    for content in (None, "{", "[]", '{"class_names": ["background"]}', '{"settings": {}, "cases": {"z": 3}}'):
        if content is not None:
            (tmp_path / RECORD).write_text(content)
        with members.refused(rf"holds label maps that no {RECORD} accounts for, such as z\.nii\.gz; .* --overwrite"):
            fill(folder(tmp_path), cases("a"))
    assert fill(folder(tmp_path), cases("a"), overwrite=True) == ["a"]
    assert (tmp_path / "z.nii.gz").exists()


def test_one_name_of_two_images_is_refused(tmp_path: Path) -> None:
    fill(folder(tmp_path), cases("a", "b"))
    with members.refused(r"holds a case a of another image, \S+/images/a\.nii\.gz, not \S+/elsewhere/a\.nii\.gz"):
        fill(folder(tmp_path), cases("a", "c", root="elsewhere"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_images_are_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "a.nii.gz").write_text("image")
    with members.refused(r"would replace the images themselves, such as \S+/a\.nii\.gz"):
        fill(folder(tmp_path), cases("a", root=str(tmp_path)), overwrite)
    assert (tmp_path / "a.nii.gz").read_text() == "image"


def test_who_is_at_work_is_not_overwritten(tmp_path: Path) -> None:
    one = folder(tmp_path)
    with one.open(cases("a", "b")):
        (mine, release), *_ = [next(one.claims(cases("a", "b")))]
        one.label(mine.id).write_text("done")
        release()
        with members.refused("overlap: 0.5 there, 0.25 now.*another process is at work there"):
            fill(folder(tmp_path, overlap=0.25), cases("a", "b"), overwrite=True)
        assert fill(folder(tmp_path), cases("a", "b"), overwrite=True) == ["b"]  # joins it
    assert fill(folder(tmp_path), cases("a", "b"), overwrite=True) == ["a", "b"]


def test_what_killed_processes_leave_is_cleaned_away(tmp_path: Path) -> None:
    fill(folder(tmp_path), cases("a"))
    (tmp_path / ".claims").mkdir()
    for name in (".123.b.nii.gz", ".claims/host-123-4.process", ".claims/b.lock", ".other.nii.gz"):
        (tmp_path / name).write_text("")
    assert fill(folder(tmp_path), cases("a", "b")) == ["b"]
    assert {p.name for p in tmp_path.glob(".*")} == {".lock", ".other.nii.gz"}


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with members.refused(r"--output \S+/file: cannot be written \(File exists\)"):
        fill(folder(tmp_path / "file"), cases("a"))
