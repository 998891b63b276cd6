"""medconv/inference/output.py: which results may stay beside new ones, shared cases, the manifest."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import members
from helpers.members import refused

from medconv.data.case import Case
from medconv.data.io.manifest import MANIFEST, read_manifest
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.output import OutputTable
from medconv.inference.output import Output, OutputDir, differences, manifest_entry

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


def test_the_training_cases_that_are_predicted_are_listed(tmp_path):
    fill(OutputDir(tmp_path, {}, {"train_cases": ["b", "elsewhere"]}), cases("a", "b"))
    assert manifest(tmp_path)["train_cases"] == ["b"]


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


def test_another_path_to_the_same_image_is_the_same_image(output, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.nii.gz").write_text("image")
    (tmp_path / "link").symlink_to(tmp_path / "images")
    out = tmp_path / "out"
    assert fill(output(out), cases("a", root=str(tmp_path / "images"))) == ["a"]
    for other in ("link", "images/../images"):
        assert fill(output(out), cases("a", root=str(tmp_path / other))) == []


def test_what_was_computed_of_all_results_stays_as_long_as_they_do(output, tmp_path):
    fill(output(tmp_path), cases("a", "b"))
    content = {"share": 0.9, "cases": {"a": {"box": 0.8}, "b": {"box": 0.7}}}
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest(tmp_path), "lower_bounds": content}))
    assert fill(output(tmp_path), cases("a", "b")) == [] and manifest(tmp_path)["lower_bounds"] == content
    with output(tmp_path).open(cases("a", "b", "c")):  # one that fails each time
        pass
    assert manifest(tmp_path)["lower_bounds"] == content
    fill(output(tmp_path), cases("a", "b", "c"))
    assert "lower_bounds" not in manifest(tmp_path)
    # a process that was killed after its first result has left them; the next one sees it
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest(tmp_path), "lower_bounds": content}))
    fill(output(tmp_path), cases("a", "b", "c"))
    assert "lower_bounds" not in manifest(tmp_path)


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


def test_an_image_that_is_replaced_or_removed_meanwhile_is_an_error(output, tmp_path):
    image = tmp_path / "a.nii.gz"
    image.write_text("old")
    (case,) = cases("a", root=tmp_path)
    folder = output(tmp_path / "out")
    with folder.open([case]):
        folder.check_unchanged(case)
        for change in (lambda: image.write_text("another"), image.unlink):
            change()
            with pytest.raises(ValueError, match=r"a\.nii\.gz: was replaced or removed while it was"):
                folder.check_unchanged(case)


def test_an_image_that_was_replaced_before_it_had_a_result_is_predicted(output, tmp_path):
    image = tmp_path / "a.nii.gz"
    image.write_text("damaged")
    (case,) = cases("a", root=tmp_path)
    with output(tmp_path / "out").open([case]):
        pass
    image.write_text("mended")
    assert fill(output(tmp_path / "out"), [case]) == ["a"]


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


def folder(path, probabilities=False, **settings):
    return OutputDir(
        path, {"overlap": 0.5, **settings}, {"class_names": ["background", "box"]}, probabilities
    )


def fill_folder(output, listed, overwrite=False):
    """Predict all cases that are free; returns their names."""
    done = []
    with output.open(listed, overwrite):
        for case, release in output.claims(listed):
            output.label(case.id).write_text("".join(sorted(map(str, output.settings.values()))))
            done.append(case.id)
            release()
    return done


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


def test_predictions_of_another_format_are_refused(tmp_path):
    """Else they would stay beside a manifest that is not theirs, and be scored by it."""
    fill(label_maps(tmp_path / "out"), cases("a"))
    pictures = [Case("b", (tmp_path / "images/b.png",))]
    (tmp_path / "out/screenshot.png").touch()  # of no case
    with pytest.raises(ValueError, match=r"holds a\.nii\.gz, not \*\.png; take another folder"):
        fill(label_maps(tmp_path / "out", overlap=0.25), pictures)
    assert (tmp_path / "out/a.nii.gz").is_file() and manifest(tmp_path / "out")["settings"]["overlap"] == 0.5


def test_other_files_are_another_setting(tmp_path):
    fill_folder(folder(tmp_path), cases("a", "b"))
    with members.refused("probabilities: False there, True now"):
        fill_folder(folder(tmp_path, probabilities=True), cases("a"))


def test_overwrite_removes_the_results_first(tmp_path):
    fill_folder(folder(tmp_path), cases("a", "b"))
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
            fill_folder(folder(tmp_path), cases("a", "z"), overwrite)
    assert (tmp_path / "z.nii.gz").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "way", ["same", "link", "..", "another's name", "other ending", "image is a link", "probabilities"]
)
def test_the_folder_of_an_image_is_refused(tmp_path, overwrite, way):
    """By any path, and also if a manifest lists the image as if it were a label map."""
    images = tmp_path / "out/probabilities" if way == "probabilities" else tmp_path / "images"
    fill_folder(folder(images.parent if way == "probabilities" else images), cases("a"))
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
        fill_folder(folder(outputs.get(way, images)), [case], overwrite)
    assert image.read_text() == "image"


def test_results_of_a_running_process_are_not_overwritten(tmp_path):
    one = folder(tmp_path)
    with one.open(cases("a", "b")):
        case, release = next(one.claims(cases("a", "b")))
        one.label(case.id).write_text("done")
        release()
        with members.refused("overlap: 0.5 there, 0.25 now.*another process is writing there"):
            fill_folder(folder(tmp_path, overlap=0.25), cases("a", "b"), overwrite=True)
        with members.refused("holds results that would be overwritten; another process is writing there"):
            fill_folder(folder(tmp_path), cases("a", "b"), overwrite=True)
    with one.open(cases("a", "b"), overwrite=True):
        case, release = next(one.claims(cases("a", "b")))
        one.label(case.id).write_text("done")
        release()
        assert fill_folder(folder(tmp_path), cases("a", "b"), overwrite=True) == [
            "b"
        ]  # the same command joins in
        assert manifest(tmp_path)["overwriting"] == ["a", "b"]
    assert manifest(tmp_path)["overwriting"] == []


def test_files_of_killed_processes_are_removed(tmp_path):
    fill_folder(folder(tmp_path), cases("a"))
    (tmp_path / ".claims").mkdir()
    for name in (".123.b.nii.gz", ".claims/host-123-4.process", ".claims/b.lock", ".other.nii.gz"):
        (tmp_path / name).write_text("")
    assert fill_folder(folder(tmp_path), cases("a", "b")) == ["b"]
    assert {p.name for p in tmp_path.glob(".*")} == {".lock", ".other.nii.gz"}


A = {"images": ["/a.nii"], "stamps": [[1, 2]]}


def test_a_manifest_is_read_back(tmp_path):
    assert read_manifest(tmp_path) == {}
    manifest = {"settings": {"overlap": 0.5}, "cases": {"a": A}, "overwriting": ["a"], "checkpoint": "x"}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": []},
        {"overwriting": [1]},
        {"cases": {"a": {**A, "stamps": []}}},
        {"cases": {"a": {"images": [], "stamps": []}}},
    ],
)
def test_a_damaged_manifest_counts_as_none(tmp_path, changes):
    manifest = {"settings": {}, "cases": {"a": A}, "overwriting": [], **changes}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert read_manifest(tmp_path) == {}


def test_the_entry_of_a_case_changes_with_its_image(tmp_path):
    image = tmp_path / "a.nii"
    assert manifest_entry([image]) == {"images": [str(image)], "stamps": [None]}
    image.write_text("1")
    before = manifest_entry([image])
    image.write_text("22")
    assert before["stamps"][0] and manifest_entry([image]) != before


def test_differing_settings_are_named_with_both_values():
    assert differences({"overlap": 0.5, "same": 1}, {"same": 1, "flips": [0]}) == [
        "flips: None there, [0] now",
        "overlap: 0.5 there, None now",
    ]


def test_files_are_not_named_by_their_hashes():
    old = {"checkpoints": ["ab12"], "postprocess": None}
    assert differences(old, {**old, "checkpoints": ["cd34"]}) == ["another checkpoint"]
    one = {"checkpoints": ["ab"], "overlap": [0.5], "mirror_axes": [[0]]}
    two = {"checkpoints": ["ab", "cd"], "overlap": [0.5, 0.5], "mirror_axes": [[0], []]}
    assert differences(one, two) == ["another checkpoint", "mirror_axes: [[0]] there, [[0], []] now"]
    assert differences(two, {**two, "overlap": [0.5]}) == ["overlap: [0.5, 0.5] there, [0.5] now"]
    assert differences(old, {**old, "postprocess": "ef56"}) == ["another post-processing, or none"]
