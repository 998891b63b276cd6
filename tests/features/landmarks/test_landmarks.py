"""medconv/features/landmarks: points with names, from their files to predictions for Slicer."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import small_runs, tiny
from torch.nn import functional as F

import medconv
from medconv.config import ConfigError
from medconv.data.case import Grid
from medconv.data.preprocessing.check import assumed_spacing
from medconv.data.preprocessing.examine import examine
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, preprocess_image
from medconv.features.landmarks import heatmaps, views
from medconv.features.landmarks.errors import cells_of, row_of, summary_of
from medconv.features.landmarks.evaluation import evaluate, page
from medconv.features.landmarks.inference import PointAnswer, mean_of
from medconv.features.landmarks.layout import landmarks
from medconv.features.landmarks.losses import HeatmapLoss
from medconv.features.landmarks.points import as_array, read_points, write_points
from medconv.features.landmarks.targets import LandmarkTargets
from medconv.inference.predictor import Predictor
from medconv.targets import Targets
from medconv.training.losses.fit import FittedLoss
from medconv.utils.errors import ArgumentError
from medconv.utils.exit_codes import DONE, USER

AFFINE = np.array([[-1.0, 0, 0, 12], [0, 1.5, 0, -7], [0, 0, 2, 30], [0, 0, 0, 1]])
SHAPE = (20, 18, 14)


def write_cases(root, cases=6):
    """A bright ball (`apex`), and in every case but the last a dark one (`base`); points in three formats,
    and in one table.
    """
    table = ["case,name,x,y,z"]
    for number in range(cases):
        rng = np.random.default_rng(number)
        # every other file has its first axis the other way round
        affine = AFFINE * np.array([-1.0 if number % 2 else 1.0, 1, 1, 1])
        voxels = {"apex": rng.uniform(5, 8, 3), "base": rng.uniform((12, 11, 8), (14, 13, 9))}
        if number == cases - 1:
            del voxels["base"]
        image = rng.normal(1, 0.1, SHAPE)
        for name, centre in voxels.items():
            squared = sum((axis - each) ** 2 for axis, each in zip(np.indices(SHAPE), centre, strict=True))
            image += (3 if name == "apex" else -2) * np.exp(-squared / 8)
        (root / "images").mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(image.astype(np.float32), affine), root / f"images/case{number}.nii.gz")
        points = {name: affine[:3, :3] @ centre + affine[:3, 3] for name, centre in voxels.items()}
        for folder in ("slicer", "json", "csv"):
            (root / folder).mkdir(exist_ok=True)
        write_points(root / f"slicer/case{number}.mrk.json", points, f"case{number}")
        plain = {name: point.tolist() for name, point in points.items()}
        (root / f"json/case{number}.json").write_text(json.dumps(plain))
        lines = [f"{name},{x},{y},{z}" for name, (x, y, z) in plain.items()]
        (root / f"csv/case{number}.csv").write_text("\n".join(["name,x,y,z", *lines]))
        table += [f"case{number},{line}" for line in lines]
    (root / "all.csv").write_text("\n".join(table))
    return root


def train(root, folder, *more):
    """One run in this process; returns its summary."""
    overrides = [
        "data=landmarks",
        f"data.root={root}",
        "data.images=images",
        "data.labels=slicer",
        f"data.cache_dir={root.parent / 'prepared'}",
        *tiny.SMALL,
        "data.samples_per_epoch=80",  # few validations
        "optimizer=adamw",
        "optimizer.lr=0.01",
        f"run.dir={folder}",
    ]
    return tiny.trained(*overrides, *more)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return write_cases(tmp_path_factory.mktemp("points") / "data")


@pytest.fixture(scope="module")
def trained(cases):
    folder = cases.parent / "run"
    train(cases, folder, "callbacks=default", "trainer.max_steps=80")
    return folder


def test_all_formats_hold_the_same_points(cases):
    for number in (0, 5):
        case = f"case{number}"
        of_slicer = read_points(cases / f"slicer/{case}.mrk.json", case)
        for file in (f"json/{case}.json", f"csv/{case}.csv", "all.csv"):
            points = read_points(cases / file, case)
            assert points.keys() == of_slicer.keys()
            np.testing.assert_allclose(as_array(points, points), as_array(of_slicer, points), atol=1e-4)
    content = json.loads((cases / "slicer/case0.mrk.json").read_text())
    # written as Slicer's own, which point left and posterior
    (markup,) = content["markups"]
    point = markup["controlPoints"][0]
    expected = read_points(cases / "json/case0.json", "case0")["apex"] * [-1, -1, 1]
    np.testing.assert_allclose(point["position"], expected, atol=1e-4)
    markup["coordinateSystem"] = "RAS"
    markup["controlPoints"][1]["positionStatus"] = "undefined"
    (cases.parent / "ras.mrk.json").write_text(json.dumps(content))
    points = read_points(cases.parent / "ras.mrk.json", "ras")
    assert list(points) == ["apex"]
    np.testing.assert_allclose(points["apex"], expected, atol=1e-4)


def test_a_table_has_a_row_for_a_case_without_points(tmp_path):
    path = tmp_path / "a.csv"
    write_points(path, {}, "a")
    assert read_points(path, "a") == {}
    with pytest.raises(ValueError, match=r"a.csv: no row of case b; a case without points has a row"):
        read_points(path, "b")
    write_points(path, {"=apex": np.array([1.0, 2, 3])}, "a", {"=apex": 0.5})
    assert read_points(path, "a")["=apex"].tolist() == [1, 2, 3]
    assert path.read_text().splitlines()[1].endswith(",0.500")
    # as of merged cells of a spreadsheet; its point would count as absent
    path.write_text("case,name,x,y,z\na,apex,1,2,3\n\n,base,4,5,6\n,,,,\n")
    with pytest.raises(ValueError, match=r"a.csv, row 4: the point base has no case"):
        read_points(path, "a")


@pytest.mark.parametrize("reoriented", [True, False])
@pytest.mark.parametrize("direction", [1, -1])
def test_a_peak_lies_where_the_point_is_between_voxels(reoriented, direction):
    affine = AFFINE @ np.diag([direction, 1, 1, 1])
    # stored with its second and third axes exchanged
    affine = affine[:, [0, 2, 1, 3]]
    grid = Grid.of((40, 24, 36), affine)
    canonical = (40, 36, 24) if reoriented else (40, 24, 36)
    crop = CropInfo(grid, canonical, ((2, 38), (1, 35), (0, 24)), reoriented)
    shape = (30, 34, 40)
    points = np.array([[11.3, 9.2, 14.7], [21.0, 14.4, 16.2], [np.nan] * 3])
    mm = points @ affine[:3, :3].T + affine[:3, 3]
    voxels = heatmaps.to_prepared(mm, crop, shape)
    np.testing.assert_allclose(heatmaps.to_mm(voxels, crop, shape), mm)
    sigma = heatmaps.sigmas(3.0, crop, shape)
    places, heights = heatmaps.peaks(heatmaps.drawn(voxels, sigma, shape), sigma)
    found = heatmaps.to_mm(places, crop, shape)
    assert np.linalg.norm(found - mm, axis=1)[:2].max() < 0.1
    assert heights[:2].min() > 0.9
    assert heights[2] == 0


@pytest.mark.parametrize("place", [-0.4, 0.0, 0.3, 1.2, 9.0, 9.4])
def test_a_peak_at_the_edge_is_not_drawn_inwards(place):
    sigma = np.array([3.0, 3.0, 1.0])
    at_edges = np.array([[59 - place, 30.2, place], [place, place, 4.3]])
    heights = heatmaps.drawn(at_edges, sigma, (60, 60, 10)) + np.float16(1e-3)
    np.testing.assert_allclose(heatmaps.peaks(heights, sigma)[0], at_edges, atol=0.05)


WRONG = {
    "twice": (
        '{"markups": [{"controlPoints": [POINT, POINT]}]}',
        ".mrk.json",
        "the point apex is there twice",
    ),
    "twice in JSON": ('{"apex": [1, 2, 34], "apex": [1, 2, 35]}', ".json", "the point apex is there twice"),
    "decimal commas": (
        "name,x,y,z\napex,1,5,2,25,34,0",
        ".csv",
        "row 2: more cells than columns; decimals are written 1.5",
    ),
    "outside": ('{"apex": [500, 0, 40]}', ".json", "apex at (500, 0, 40) mm (RAS) lies outside of the image"),
    "numbers": ('{"apex": [1, 2]}', ".json", "apex is at [1, 2], expected three finite numbers"),
    "nan": ('{"apex": [1, 2, NaN]}', ".json", "expected three finite numbers"),
    "unknown": ('{"apx": [1, 2, 34]}', ".json", "unknown point apx, expected apex, base"),
    "columns": ("label,x,y,z\napex,1,2,3", ".csv", "expected the columns name, x, y, z"),
    "no byte": ("", ".csv", "expected the columns name, x, y, z"),
    "spaces": ("name,x,y,z\napex ,1,2,34\n apex,1,2,35", ".csv", "the point apex is there twice"),
    "system": ('{"markups": [{"coordinateSystem": "IJK"}]}', ".mrk.json", "coordinateSystem IJK"),
    "unit": ('{"markups": [{"coordinateUnits": ["m"]}]}', ".mrk.json", "coordinateUnits ['m']"),
    "list": ("[1, 2]", ".json", "expected an object such as"),
    "empty": ("{}", ".json", "has none of the points"),
}
POINT = '{"label": "apex", "position": [1, 2, 34]}'


@pytest.mark.parametrize("name", WRONG)
def test_what_looks_wrong_in_a_file_of_points(name, cases, tmp_path):
    content, suffix, text = WRONG[name]
    path = tmp_path / f"case0{suffix}"
    path.write_text(content.replace("POINT", POINT))
    dataset = landmarks(str(cases / "images"), str(tmp_path / "{id}") + suffix, ["apex", "base"])
    (case,) = (case for case in dataset.cases if case.id == "case0")
    report = examine(case, dataset)
    (message,) = report.errors or report.warnings
    assert text in message
    assert path.name in message
    assert bool(report.errors) == (name != "empty")


def test_another_spacing_than_the_headers_is_refused(cases):
    dataset = landmarks("images", "csv", root=str(cases))
    case = replace(dataset.cases[0], source_spacing_mm=(1.0, 1.5, 7.0))
    (message,) = examine(case, dataset).errors
    assert "case0.csv: its points are in mm of the image's header, but another spacing is taken" in message


def test_the_header_s_own_spacing_may_be_stated_and_few_slices_are_no_reason_to_doubt_it(cases):
    """As the warning of few slices of 1 x 1 x 1 mm says: points in mm would lie elsewhere with another one."""
    dataset = landmarks("images", "csv", root=str(cases))
    case = replace(dataset.cases[0], source_spacing_mm=(1.0, 1.5, 2.0))
    assert not examine(case, dataset).errors
    thin = {"shapes": [(60, 60, 12)] * 2, "spacings_mm": [(1.0, 1.0, 1.0)] * 2}
    assert assumed_spacing(**thin) and not assumed_spacing(**thin, targets=dataset.targets)


def test_a_point_in_the_empty_margin_of_its_image_is_named(cases, tmp_path):
    """Prepared images are cropped to their content, so that there is no voxel to learn it from."""
    dataset = landmarks("images", "csv", root=str(cases))
    case = dataset.cases[0]
    image = nib.load(case.images[0])
    voxels = np.asarray(image.dataobj).copy()
    position = read_points(case.label, case.id)["apex"]
    place = np.round(np.linalg.inv(image.affine) @ [*position, 1])[:3].astype(int)
    voxels[: place[0] + 2] = 0
    nib.save(nib.Nifti1Image(voxels, image.affine), tmp_path / "case0.nii.gz")
    masked = replace(case, images=(tmp_path / "case0.nii.gz",))
    (warning,) = examine(masked, dataset).warnings
    assert (
        "apex at (" in warning
        and "is 0 up to its edge, which is cut off; it is learned from what is left of its heatmap" in warning
    )


def test_points_of_another_program_are_scored_from_folders_and_from_one_table(cases, tmp_path):
    """With a manifest that has `targets` alone, as the page says."""
    predictions = tmp_path / "csv"
    shutil.copytree(cases / "csv", predictions)
    targets = LandmarkTargets(("apex", "base"), 3.0, 0.2).plain()
    (predictions / "prediction.json").write_text(json.dumps({"targets": targets}))
    for references in (cases / "csv", cases / "all.csv"):
        assert medconv.evaluate(predictions, references).mean["mre"] == 0
    del targets["sigma_mm"]  # no reason to look for label maps there
    (predictions / "prediction.json").write_text(json.dumps({"targets": targets}))
    with pytest.raises(ValueError, match=r"prediction.json: its `targets` are .* a positive sigma_mm"):
        medconv.evaluate(predictions, cases / "csv")


def test_scores_do_not_replace_the_table_of_references(cases, tmp_path, monkeypatch, capsys):
    predictions = tmp_path / "csv"
    shutil.copytree(cases / "csv", predictions)
    targets = LandmarkTargets(("apex", "base"), 3.0, 0.2).plain()
    (predictions / "prediction.json").write_text(json.dumps({"targets": targets}))
    table = Path(shutil.copy(cases / "all.csv", tmp_path))
    words = ("--predictions", predictions, "--references", table, "--output", table.with_suffix(".json"))
    assert tiny.call(monkeypatch, "evaluate", *words) == USER
    assert f"would replace {table}, which this evaluation reads" in capsys.readouterr().err
    assert table.read_text() == (cases / "all.csv").read_text()


def test_there_are_no_classes_to_draw_equally_often(cases, tmp_path):
    with pytest.raises(
        ConfigError, match="draws each class equally often, and these targets have no classes"
    ):
        train(cases, tmp_path / "run", "sampler=balanced")


def test_the_layout_names_what_is_missing(cases, tmp_path):
    suffixes = {"slicer": ".mrk.json", "json": ".json", "json/{id}.json": ".json", "csv": ".csv"}
    for labels, suffix in (suffixes | {"all.csv": ".csv"}).items():
        dataset = landmarks("images", labels, root=str(cases))
        assert not dataset.errors
        assert dataset.targets == LandmarkTargets(("apex", "base"), suffix=suffix)
    (tmp_path / "dots").mkdir()
    write_points(tmp_path / "dots/case0.1.mrk.json", {"apex": np.zeros(3)}, "case0.1")
    nib.save(nib.Nifti1Image(np.zeros(SHAPE, np.float32), AFFINE), tmp_path / "dots/case0.1.nii.gz")
    assert not landmarks(f"{tmp_path}/dots/{{id}}.nii.gz", "dots", root=str(tmp_path)).errors
    with pytest.raises(ArgumentError, match="labels is not set"):
        landmarks(str(cases / "images"), "")
    with pytest.raises(ArgumentError, match="no points there, expected files .mrk.json, .json, .csv"):
        landmarks(str(cases / "images"), str(cases / "images"))
    (tmp_path / "case0.json").write_text("{}")
    with pytest.raises(ArgumentError, match="a table of all cases needs the column case"):
        landmarks(str(cases / "images"), str(cases / "csv/case0.csv"))
    with pytest.raises(ArgumentError, match="no file there has a point"):
        landmarks(str(cases / "images"), str(tmp_path))
    with pytest.raises(ValueError, match="landmarks need a positive sigma_mm"):
        landmarks("images", "slicer", sigma_mm=-1, root=str(cases))


def test_targets_take_their_loss_and_come_back_from_plain_values():
    targets = LandmarkTargets(names=("apex", "base"), sigma_mm=2.0)
    assert Targets.from_plain(json.loads(json.dumps(targets.plain()))) == targets
    FittedLoss(HeatmapLoss(), targets, spatial_dims=3)
    with pytest.raises(ValueError, match="CrossEntropyLoss is for label_map .*use loss=heatmap"):
        FittedLoss(torch.nn.CrossEntropyLoss(), targets, spatial_dims=2)
    for change in ({"threshold": 1}, {"sigma_mm": True}, {"names": []}, {"suffix": ".txt"}):
        with pytest.raises(ValueError, match="landmarks need"):
            Targets.from_plain({**targets.plain(), **change})
    heatmap = torch.rand(2, 2, 8, 8)
    right = HeatmapLoss()(torch.logit(heatmap), heatmap)
    assert float(right) == pytest.approx(0, abs=1e-6)
    assert HeatmapLoss()(torch.zeros(2, 2, 8, 8), heatmap) > 0.01


def test_errors_of_points_that_are_missed_absent_or_wrong():
    names = ["a", "b", "c", "d"]
    reference = np.array([[0.0, 0, 0], [1, 1, 1], [np.nan] * 3, [np.nan] * 3])
    positions = np.array([[0.0, 3, 4], [1, 1, 2], [5, 5, 5], [5, 5, 5]])
    row = row_of(positions, np.array([True, False, True, False]), reference, names)
    errors = {"error_mm/a": 5, "error_mm/b": 1, "error_mm/c": None, "error_mm/d": None}
    assert cells_of(row) == {**errors, "missed_points": "b", "wrong_points": "c"}
    assert summary_of([row]) == {
        "mre": 3,
        "within_2mm": 0,  # b is near, but missed
        "missed": 0.5,
        "wrong": 0.5,
        "mre_per_point": {"a": 5, "b": 1, "c": None, "d": None},
    }


def test_scores_over_folds_are_over_all_points_and_over_the_means_of_folds():
    targets = LandmarkTargets(names=("a",))
    near, far = ({"a": {"error_mm": mm, "is_there": True, "is_found": True}} for mm in (1.0, 4.0))
    scores = targets.scores.over_folds([{"x": near, "y": near}, {"z": far}])
    assert scores["mean"]["mre"] == 2
    assert scores["mean"]["mre_per_point"] == {"a": 2}
    lines = dict(targets.scores.over_folds_lines(scores, 3))
    assert lines["all cases, mean"][:2] == [2, pytest.approx(2 / 3)]
    assert lines["mean of folds"][:2] == [2.5, 0.5]


def test_a_run_learns_scores_shows_and_goes_on(cases, trained, tmp_path):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["score"]["name"] == "val/mre"
    assert summary["val/mre"] < 4
    assert all(0 <= row["apex"]["height"] <= 1 for row in summary["val/cases"].values())
    assert {"val/within_2mm", "val/missed", "val/wrong"} <= set(summary)
    tags = small_runs.image_tags(trained)
    assert any("(image, heatmaps)" in tag for tag in tags)
    assert any("(image, predicted heatmaps)" in tag for tag in tags)
    last = trained / "checkpoints/last.ckpt"
    more = ["callbacks=default", "trainer.max_steps=82", f"run.resume={last}"]
    assert train(cases, tmp_path / "on", *more)["steps"] == 82


def test_predictions_are_those_of_the_validation(cases, trained, tmp_path, monkeypatch, capsys):
    output = tmp_path / "predictions"
    words = ["--checkpoint", trained, "--input", cases / "images", "--output", output]
    assert tiny.call(monkeypatch, "predict", *words) == DONE
    assert {path.name for path in output.glob("*.mrk.json")} == {f"case{n}.mrk.json" for n in range(6)}
    predicted = Predictor.load(trained)(cases / "images/case3.nii.gz")
    written = as_array(read_points(output / "case3.mrk.json", "case3"), ["apex", "base"])
    np.testing.assert_allclose(predicted, written, atol=1e-3)
    (markup,) = json.loads((output / "case3.mrk.json").read_text())["markups"]
    assert float(markup["controlPoints"][0]["description"].removeprefix("height ")) >= 0.2
    scores = tmp_path / "scores.json"
    words = ["--predictions", output, "--references", cases / "csv", "--output", scores]
    assert tiny.call(monkeypatch, "evaluate", *words, "--compare", cases / "json") == DONE
    result = json.loads(scores.read_text())
    validated = json.loads((trained / "summary.json").read_text())["val/cases"]
    for row in result["cases"]:
        for name, point in row["points"].items():
            if row["case"] in validated and point["is_found"]:
                assert point["error_mm"] == pytest.approx(validated[row["case"]][name]["error_mm"], abs=1e-2)
    assert result["compare"]["mean"]["mre"] == pytest.approx(0, abs=1e-3)
    assert result["comparison"]["mre"]["n"] == 6
    assert "mean radial error (mm)" in capsys.readouterr().out
    report = scores.with_suffix(".html").read_text()
    assert "Errors in mm" in report
    assert report.count("data:image/png") == 6
    header, row, *_ = csv.reader(scores.with_suffix(".csv").open())
    assert header[1:3] == ["case", "mre"]
    assert float(row[header.index("error_mm/apex")]) < 4
    # what is for label maps alone is refused, in one line
    assert tiny.call(monkeypatch, "evaluate", *words, "--lesions") == USER
    assert "--lesions is for label maps of classes" in capsys.readouterr().err
    # a reference of another name would not be counted
    odd = cases.parent / "odd"
    odd.mkdir()
    write_points(odd / "case3.mrk.json", {"tip": np.zeros(3)}, "case3")
    words[1] = output / "{id}3.mrk.json"
    words[3] = odd / "{id}3.mrk.json"
    assert tiny.call(monkeypatch, "evaluate", *words) == USER
    assert "case3.mrk.json: unknown point tip, expected apex, base" in capsys.readouterr().err


def test_networks_of_other_thresholds_are_not_averaged(trained):
    """That of the first would decide which points are absent."""
    (member,) = Predictor.load(trained).members
    assert len(Predictor([member, member]).members) == 2
    for field, value in {"threshold": 0.3, "sigma_mm": 5.0}.items():
        other = replace(member, targets=replace(member.targets, **{field: value}))
        with pytest.raises(ValueError, match=rf"its targets differ: .*{field}={value:g}"):
            Predictor([member, other])


def test_a_network_that_does_not_find_a_point_does_not_move_it():
    """Of several preprocessings; its highest voxel is anywhere."""
    targets = LandmarkTargets(("a", "b", "c"), threshold=0.2)
    crop = CropInfo(Grid.of(SHAPE, AFFINE), SHAPE, tuple((0, voxels) for voxels in SHAPE))
    first = PointAnswer(np.full((3, 3), 1.0), np.array([0.9, 0.8, 0.1]), targets, crop)
    second = PointAnswer(np.full((3, 3), 4.0), np.array([0.1, 0.5, 0.1]), targets, crop)
    mean = mean_of([first, second], [2 / 3, 1 / 3])
    np.testing.assert_allclose(mean.heights, [1.9 / 3, 0.7, 0.1])
    np.testing.assert_allclose(mean.positions[:, 0], [1, 2, 2])
    np.testing.assert_allclose(mean.answer()[:, 0], [1, 2, np.nan])


def test_half_precision_throughout_is_refused(cases, tmp_path):
    """Lightning would round the positions, as all numbers of a batch."""
    with pytest.raises(ConfigError, match=r"trainer\.precision=bf16-true rounds the numbers to learn"):
        train(cases, tmp_path / "run", "trainer.precision=bf16-true")


def test_points_are_in_mm_of_the_file_where_another_spacing_was_stated(cases, trained, tmp_path):
    """Its voxels are twice as large by its header, which the user replaces by the spacing of training."""
    image = nib.load(cases / "images/case3.nii.gz")
    affine = image.affine.copy()
    affine[:3, :3] *= 2
    nib.save(nib.Nifti1Image(image.get_fdata(dtype=np.float32), affine), tmp_path / "wrong.nii.gz")
    spacing_mm = nib.affines.voxel_sizes(nib.as_closest_canonical(image).affine)
    expected_voxels = nib.affines.apply_affine(
        np.linalg.inv(image.affine), Predictor.load(trained)(cases / "images/case3.nii.gz")
    )
    predictor = Predictor.load(trained, source_spacing_mm=[float(mm) for mm in spacing_mm])
    wrong = nib.load(tmp_path / "wrong.nii.gz")
    for positions in (
        predictor(tmp_path / "wrong.nii.gz"),
        predictor(wrong),
        predictor(wrong.get_fdata(dtype=np.float32), affine=affine),
    ):
        found = nib.affines.apply_affine(np.linalg.inv(affine), positions)
        np.testing.assert_allclose(found, expected_voxels, atol=1e-3)


def test_a_slice_has_two_axes(tmp_path):
    for number in range(6):
        image = np.random.default_rng(number).normal(1, 0.1, (24, 20, 1))
        image[4 + number : 7 + number, 8:11] += 3
        path = tmp_path / f"data/images/case{number}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(image.astype(np.float32), AFFINE), path)
        (tmp_path / "data/slicer").mkdir(exist_ok=True)
        point = AFFINE[:3, :3] @ [5 + number, 9, 0] + AFFINE[:3, 3]
        write_points(tmp_path / f"data/slicer/case{number}.mrk.json", {"apex": point}, f"case{number}")
    summary = train(tmp_path / "data", tmp_path / "run", "trainer.max_steps=40")
    assert summary["val/mre"] < 4
    ((_, _, height),) = Predictor.load(tmp_path / "run")(tmp_path / "data/images/case3.nii.gz")
    assert height == pytest.approx(AFFINE[2, 3])
    # the points of a volume beside one of its slices
    dataset = landmarks("images", "slicer", root=str(tmp_path / "data"))
    write_points(dataset.cases[0].label, {"apex": point + AFFINE[:3, 2]}, "case0")
    (error,) = examine(dataset.cases[0], dataset).errors
    assert "apex at" in error and "lies outside of the image" in error


def test_mirrored_images_exchange_the_names_of_pairs(tmp_path, monkeypatch, capsys):
    """Two balls that only their side tells apart, and a JSON file for each image."""
    for number in range(6):
        rng = np.random.default_rng(number)
        voxels = {"left": rng.uniform(4, 7, 3), "right": rng.uniform((13, 4, 4), (16, 7, 7))}
        image = rng.normal(1, 0.1, SHAPE)
        for centre in voxels.values():
            squared = sum((axis - each) ** 2 for axis, each in zip(np.indices(SHAPE), centre, strict=True))
            image += 3 * np.exp(-squared / 8)
        for folder in ("images", "slicer"):
            (tmp_path / f"data/{folder}").mkdir(parents=True, exist_ok=True)
        nib.save(
            nib.Nifti1Image(image.astype(np.float32), AFFINE), tmp_path / f"data/images/case{number}.nii.gz"
        )
        points = {name: AFFINE[:3, :3] @ centre + AFFINE[:3, 3] for name, centre in voxels.items()}
        write_points(tmp_path / f"data/slicer/case{number}.json", points, "")
    mirrored = ["augmentation.mirror_axes=[0]", "task.mirror_axes=[0]"]
    with pytest.raises(ConfigError, match=r"name the points that swap, such as data.flip_label_pairs"):
        train(tmp_path / "data", tmp_path / "refused", *mirrored)
    pairs = "data.flip_label_pairs=[[left,right]]"
    summary = train(tmp_path / "data", tmp_path / "run", *mirrored, pairs, "trainer.max_steps=80")
    assert summary["val/mre"] < 3
    assert summary["val/missed"] == 0
    # predictions have the format of the training's, and stand beside a manifest that is JSON, too
    output = tmp_path / "predictions"
    words = ["--checkpoint", tmp_path / "run", "--input", tmp_path / "data/images", "--output", output]
    assert tiny.call(monkeypatch, "predict", *words) == DONE
    assert read_points(output / "case3.json", "").keys() == {"left", "right"}
    assert tiny.call(monkeypatch, "predict", *words) == DONE
    assert "0 new, 6 already there" in capsys.readouterr().out
    words = ["--predictions", output, "--references", tmp_path / "data/slicer"]
    assert tiny.call(monkeypatch, "evaluate", *words, "--output", tmp_path / "scores.json") == DONE
    assert json.loads((tmp_path / "scores.json").read_text())["mean"]["mre"] < 3


@pytest.mark.parametrize("power", [0.5, -1, float("inf")])
def test_a_power_without_a_finite_gradient_is_refused(power):
    with pytest.raises(ValueError, match="power must be 0, or a number of 1 or more"):
        HeatmapLoss(power)


@pytest.mark.parametrize(
    ("system", "signs"),
    [(None, (-1, -1, 1)), (0, (1, 1, 1)), (1, (-1, -1, 1)), ("RAS", (1, 1, 1)), ("LPS", (-1, -1, 1))],
)
def test_markups_are_in_lps_unless_they_say_otherwise(system, signs, tmp_path):
    """Slicer before 5 writes numbers: 0 is RAS, 1 LPS."""
    markup = {"controlPoints": [{"label": "apex", "position": [1, 2, 3]}]}
    if system is not None:
        markup["coordinateSystem"] = system
    path = tmp_path / "a.mrk.json"
    path.write_text(json.dumps({"markups": [markup]}))
    np.testing.assert_array_equal(read_points(path, "a")["apex"], np.multiply(signs, [1, 2, 3]))


def test_prepared_heatmaps_of_another_width_are_not_reused():
    """By what `Family.labels` says of them, of which the store's folder is named."""
    kept = heatmaps.settings(LandmarkTargets(("a", "b"), sigma_mm=3.0))
    assert heatmaps.settings(LandmarkTargets(("a", "b"), sigma_mm=2.0)) != kept
    assert heatmaps.settings(LandmarkTargets(("b", "a"), sigma_mm=3.0)) != kept
    assert heatmaps.settings(LandmarkTargets(("a", "b"), sigma_mm=3.0, threshold=0.4)) == kept


def test_a_point_between_thick_slices_is_seen():
    """Slices of 10 mm, and a heatmap of 3 mm: half a slice away it would be 0.25 high."""
    shape = (20, 20, 8)
    crop = CropInfo(Grid.of(shape, np.diag([1.0, 1, 10, 1])), shape, ((0, 20), (0, 20), (0, 8)), True)
    sigma = heatmaps.sigmas(3.0, crop, shape)
    assert sigma.tolist() == [3, 3, 1]
    assert heatmaps.drawn(np.array([[10, 10, 3.5]]), sigma, shape).max() == pytest.approx(
        np.exp(-1 / 8), abs=1e-3
    )


@pytest.mark.parametrize(("voxel", "is_outside"), [(-0.4, False), (-0.6, True), (19.4, False), (19.6, True)])
def test_an_image_reaches_half_a_voxel_beyond_its_outer_centres(voxel, is_outside, tmp_path):
    for folder in ("images", "points"):
        (tmp_path / folder).mkdir()
    image = np.random.default_rng(0).normal(5, 1, SHAPE).astype(np.float32)
    nib.save(nib.Nifti1Image(image, AFFINE), tmp_path / "images/case0.nii.gz")
    point = nib.affines.apply_affine(AFFINE, [voxel, 9, 7])
    write_points(tmp_path / "points/case0.csv", {"apex": point}, "case0")
    dataset = landmarks("images", "points", root=str(tmp_path))
    assert bool(examine(dataset.cases[0], dataset).errors) == is_outside


def test_patches_are_centred_where_a_heatmap_is_half_its_height(tmp_path):
    for folder in ("images", "points"):
        (tmp_path / folder).mkdir()
    image = np.random.default_rng(0).normal(5, 1, SHAPE).astype(np.float32)
    nib.save(nib.Nifti1Image(image, AFFINE), tmp_path / "images/case0.nii.gz")
    points = {"apex": nib.affines.apply_affine(AFFINE, [4.5, 9.5, 7.5])}
    write_points(tmp_path / "points/case0.csv", points, "case0")
    dataset = landmarks("images", "points", root=str(tmp_path))
    config = PreprocessingConfig(3, (1.0, 1.5, 2.0), ("none",), ({},))
    _, crop = preprocess_image(image[None], Grid.of(SHAPE, AFFINE), config)
    near, maps = heatmaps.prepared(dataset.targets, dataset.cases[0], image[None], crop, config)
    assert maps.shape == (1, *SHAPE) and near.sum() > 50
    np.testing.assert_array_equal(near, maps[0] > 0.5)


def test_the_page_has_cases_with_missed_points_first_then_the_largest_errors(tmp_path):
    targets = LandmarkTargets(("a", "b"))
    origin, names = np.zeros(3), ("near", "missed", "far")
    predicted = {
        "near": {"a": origin + [1, 0, 0], "b": origin},
        "missed": {"a": origin},
        "far": {"a": origin + [0, 9, 0], "b": origin},
    }
    for folder in ("predictions", "references"):
        (tmp_path / folder).mkdir()
    for case in names:
        write_points(tmp_path / f"predictions/{case}.csv", predicted[case], case)
        write_points(tmp_path / f"references/{case}.csv", {"a": origin, "b": origin}, case)
    manifest = {"targets": targets.plain()}
    (tmp_path / "predictions/prediction.json").write_text(json.dumps(manifest))
    text = page(evaluate(tmp_path / "predictions", tmp_path / "references"))
    assert sorted(names, key=lambda case: text.index(f">{case}<")) == ["missed", "far", "near"]


def test_a_peak_at_the_threshold_is_found_and_an_error_of_2_mm_is_within_2_mm():
    targets = LandmarkTargets(("a", "b"), threshold=0.25)
    crop = CropInfo(Grid.of(SHAPE, AFFINE), SHAPE, tuple((0, voxels) for voxels in SHAPE))
    answer = PointAnswer(np.zeros((2, 3)), np.array([0.25, 0.2499]), targets, crop)
    assert answer.found.tolist() == [True, False]
    row = row_of(np.array([[2.0, 0, 0]]), np.array([True]), np.zeros((1, 3)), ["a"])
    assert summary_of([row])["within_2mm"] == 1


def test_the_loss_is_its_mean_over_that_of_the_heatmaps():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, 5, generator=generator)
    heatmap = torch.rand(2, 3, 6, 5, generator=generator) ** 4
    weighted = (logits.sigmoid() - heatmap) ** 2 * F.binary_cross_entropy_with_logits(
        logits, heatmap, reduction="none"
    )
    assert float(HeatmapLoss()(logits, heatmap)) == pytest.approx(float(weighted.mean() / heatmap.mean()))
    # a patch without points counts as if a thousandth were heatmap
    empty = (logits.sigmoid() ** 2 * F.softplus(logits)).mean()
    assert float(HeatmapLoss()(logits, heatmap * 0)) == pytest.approx(float(empty) * 1000, rel=1e-5)
    # splines overshoot where a heatmap is warped
    overshot = torch.where(heatmap > 0.5, 1.1, heatmap)
    assert HeatmapLoss()(logits, overshot) == HeatmapLoss()(logits, overshot.clamp(max=1))


def test_checkpoints_are_ranked_by_the_lowest_error():
    monitored = LandmarkTargets(("a",)).monitored
    assert monitored.quality(1.0) > monitored.quality(2.0)


def test_a_prepared_voxel_of_half_the_size_lies_between_those_of_the_file():
    """The outer edges of the image stay in place, as where images are resampled."""
    grid = Grid.of((8, 8, 4), np.diag([1.0, 1, 1, 1]))
    crop = CropInfo(grid, (8, 8, 4), ((0, 8), (2, 8), (0, 4)), True)
    places = heatmaps.to_mm(np.array([[0.0, 0, 0], [3, 11, 3]]), crop, (4, 12, 4))
    np.testing.assert_allclose(places, [[0.5, 1.75, 0], [6.5, 7.25, 3]])


def test_names_keep_their_order_and_the_targets_the_numbers_of_the_layout(tmp_path):
    for folder in ("images", "points"):
        (tmp_path / folder).mkdir()
    nib.save(nib.Nifti1Image(np.zeros(SHAPE, np.float32), AFFINE), tmp_path / "images/case0.nii.gz")
    write_points(tmp_path / "points/case0.csv", {"apex": np.zeros(3)}, "case0")
    names, numbers = ["base", "apex"], {"sigma_mm": 2.0, "threshold": 0.4}
    dataset = landmarks("images", "points", names, root=str(tmp_path), **numbers)
    assert dataset.targets == LandmarkTargets(("base", "apex"), suffix=".csv", **numbers)


def test_a_case_of_a_table_is_found_however_its_accents_are_composed(tmp_path):
    """As macOS has them in names of files: a letter, then its accent."""
    path = tmp_path / "all.csv"
    path.write_text("case,name,x,y,z\nRene\u0301,apex,1,2,3\n", encoding="utf-8")
    assert list(read_points(path, "Ren\u00e9")) == ["apex"]


def test_planes_cross_at_the_worst_point():
    """A point that is rightly absent is none."""
    absent, near, far = [np.nan] * 3, [4, 4, 4], [4, 13, 4]
    reference = np.array([absent, near, near])
    assert views.worst_point(reference, np.array([absent, near, far])) == 2
    assert views.worst_point(reference, np.array([absent, absent, far])) == 1
    assert views.worst_point(reference, np.array([far, near, far])) == 0
