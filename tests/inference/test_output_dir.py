"""The folder of label maps: how processes share cases, and what is never replaced."""

import json
from pathlib import Path

import pytest
from helpers import members

from medconv.data.case import Case
from medconv.inference.output import MANIFEST, OutputDir


def cases(*names, root="images"):
    return [Case(name, (Path(root).absolute() / f"{name}.nii.gz",)) for name in names]


def folder(path, probabilities=False, **settings):
    return OutputDir(
        path, {"overlap": 0.5, **settings}, {"class_names": ["background", "box"]}, probabilities
    )


def fill(output, listed, overwrite=False):
    """Predict all cases that are free; returns their names."""
    done = []
    with output.open(listed, overwrite):
        for case, release in output.claims(listed):
            output.label(case.id).write_text("".join(sorted(map(str, output.settings.values()))))
            done.append(case.id)
            release()
    return done


def manifest(path):
    return json.loads((path / MANIFEST).read_text())


def test_two_processes_share_the_cases(tmp_path):
    """Step by step: each case once, and the manifest lists the cases of both."""
    one, two = folder(tmp_path), folder(tmp_path)
    first, second = cases("a", "b", "c"), cases("b", "c", "d")
    with one.open(first):
        claims = one.claims(first)
        case, release = next(claims)
        assert case.id == "a"
        with two.open(second):
            other_claims = two.claims(second)
            assert next(other_claims)[0].id == "b"
            assert next(claims)[0].id == "c"
            assert next(other_claims)[0].id == "d"
            assert list(other_claims) == [] and two.claimed_by_others == ["c"] and two.skipped == []
            one.label("a").write_text("done")
            release()
        assert (tmp_path / ".claims").is_dir()  # the first process still works
        two.label("b").write_text("done")
        assert list(claims) == [] and one.skipped == ["b"] and one.claimed_by_others == []
    assert list(manifest(tmp_path)["cases"]) == ["a", "b", "c", "d"]
    assert not (tmp_path / ".claims").exists()


def test_a_released_case_without_a_result_is_free_again(tmp_path):
    one, two = folder(tmp_path), folder(tmp_path)
    with one.open(cases("a", "b")), two.open(cases("a", "b")):
        claims, other_claims = one.claims(cases("a", "b")), two.claims(cases("a", "b"))
        _, release = next(claims)
        assert next(other_claims)[0].id == "b"
        release()
        assert next(other_claims)[0].id == "a"  # tried again at the end


def test_other_files_are_another_setting(tmp_path):
    fill(folder(tmp_path), cases("a", "b"))
    with members.refused("probabilities: False there, True now"):
        fill(folder(tmp_path, probabilities=True), cases("a"))


def test_overwrite_removes_the_results_first(tmp_path):
    fill(folder(tmp_path), cases("a", "b"))
    with folder(tmp_path, overlap=0.25).open(cases("a", "b"), overwrite=True):
        assert not (tmp_path / "a.nii.gz").exists()  # so a case that fails now has none


@pytest.mark.parametrize("overwrite", [False, True])
def test_label_maps_that_the_manifest_does_not_list_are_never_replaced(tmp_path, overwrite):
    (tmp_path / "z.nii.gz").write_text("")
    rest = '"settings": {}, "overwriting": []'
    entries = (
        "3",
        '{"images": [], "stamps": []}',
        '{"images": "z", "stamps": [null]}',
        '{"images": [3], "stamps": [null]}',
    )
    strange = [f'{{{rest}, "cases": {{"z": {entry}}}}}' for entry in entries]
    for content in (None, "{", "[]", '{"class_names": ["background"]}', *strange):
        if content is not None:
            (tmp_path / MANIFEST).write_text(content)
        with members.refused(
            rf"holds label maps that {MANIFEST} does not list, such as z\.nii\.gz; take another"
        ):
            fill(folder(tmp_path), cases("a", "z"), overwrite)
    assert (tmp_path / "z.nii.gz").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "way", ["same", "link", "..", "another's name", "other ending", "image is a link", "probabilities"]
)
def test_the_folder_of_an_image_is_refused(tmp_path, overwrite, way):
    """By any path, and also if a manifest lists the image as if it were a label map."""
    images = tmp_path / "out/probabilities" if way == "probabilities" else tmp_path / "images"
    fill(folder(images.parent if way == "probabilities" else images), cases("a"))
    (image := images / ("b.nii" if way == "other ending" else "a.nii.gz")).parent.mkdir(exist_ok=True)
    image.write_text("image")
    (tmp_path / "link").symlink_to(images)
    (tmp_path / "c.nii.gz").symlink_to(image)
    outputs = {"link": tmp_path / "link", "..": images / "../images", "probabilities": images.parent}
    case = Case(
        "a" if way != "another's name" else "c",
        (tmp_path / "c.nii.gz" if way == "image is a link" else image,),
    )
    with members.refused(
        r"^output \S+: holds the images themselves, such as \S+\.nii(\.gz)?; take another folder"
    ):
        fill(folder(outputs.get(way, images)), [case], overwrite)
    assert image.read_text() == "image"


def test_results_of_a_running_process_are_not_overwritten(tmp_path):
    one = folder(tmp_path)
    with one.open(cases("a", "b")):
        case, release = next(one.claims(cases("a", "b")))
        one.label(case.id).write_text("done")
        release()
        with members.refused("overlap: 0.5 there, 0.25 now.*another process is writing there"):
            fill(folder(tmp_path, overlap=0.25), cases("a", "b"), overwrite=True)
        with members.refused("holds results that would be overwritten; another process is writing there"):
            fill(folder(tmp_path), cases("a", "b"), overwrite=True)
    with one.open(cases("a", "b"), overwrite=True):
        case, release = next(one.claims(cases("a", "b")))
        one.label(case.id).write_text("done")
        release()
        assert fill(folder(tmp_path), cases("a", "b"), overwrite=True) == ["b"]  # the same command joins in
        assert manifest(tmp_path)["overwriting"] == ["a", "b"]
    assert manifest(tmp_path)["overwriting"] == []


def test_files_of_killed_processes_are_removed(tmp_path):
    fill(folder(tmp_path), cases("a"))
    (tmp_path / ".claims").mkdir()
    for name in (".123.b.nii.gz", ".claims/host-123-4.process", ".claims/b.lock", ".other.nii.gz"):
        (tmp_path / name).write_text("")
    assert fill(folder(tmp_path), cases("a", "b")) == ["b"]
    assert {p.name for p in tmp_path.glob(".*")} == {".lock", ".other.nii.gz"}
