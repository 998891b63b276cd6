"""Post-processing of label maps against flood fill, voxel by voxel; and the file that lists the steps."""

import json
import math

import numpy as np
import pytest
from helpers.slabs import image, model, scores, thin_slabs  # noqa: F401 - a fixture of all tests
from helpers.volumes import ORIENTATIONS, affine_of
from reference import components as oracle

from medconv.data.case import Grid
from medconv.features.postprocessing.extra import PostProcessing
from medconv.features.postprocessing.steps import FOREGROUND, Step, Steps, component_volumes, read
from medconv.inference.predictor import Predictor
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

CLASSES = LabelMapTargets.of_classes(("background", "a", "b"))
REGIONS = RegionTargets(("outer", "core", "enhancing"), ((1, 2, 3), (2, 3), (3,)), None, (1, 2, 3))
SPACING = (1.0, 1.5, 2.0)


def grid(label):
    return Grid.of(label.shape, np.diag([*SPACING, 1]))


def random_label(seed, shape, values=3, background=0.4):
    """Many components of any shape, and holes; values below `values`."""
    rng = np.random.default_rng(seed)
    share = [background, *[(1 - background) / (values - 1)] * (values - 1)]
    return rng.choice(values, shape, p=share).astype(np.int16)


@pytest.mark.parametrize("shape", [(7, 6, 5), (12, 11, 1), (1, 9, 10), (6, 1, 1)])
@pytest.mark.parametrize("seed", range(6))
def test_components_equal_those_of_flood_fill(shape, seed):
    label = random_label(seed, shape, background=0.75)
    before, volume = label.copy(), math.prod(SPACING)
    for name, values in (("a", (1,)), ("b", (2,)), (FOREGROUND, (1, 2))):
        processed = Step("keep_largest", name).apply(label, grid(label), CLASSES)
        assert np.array_equal(processed, oracle.keep_largest(label, values))
        for smallest in (1, 2, 3.5):  # voxels
            processed = Step("remove_small", name, smallest * volume).apply(label, grid(label), CLASSES)
            assert np.array_equal(processed, oracle.remove_small(label, values, smallest * volume, volume))
    assert np.array_equal(label, before)


@pytest.mark.parametrize("shape", [(7, 6, 5), (12, 11, 1), (1, 9, 10), (6, 1, 1)])
@pytest.mark.parametrize("background", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_filled_holes_equal_those_of_flood_fill(shape, background, seed):
    for values in (2, 3):
        label = random_label(seed, shape, values, background)
        for name, value in (("a", 1), ("b", 2)):
            filled = Step("fill_holes", name).apply(label, grid(label), CLASSES)
            assert np.array_equal(filled, oracle.fill_holes(label, value))


def test_volumes_are_in_mm3_in_any_orientation():
    label = np.zeros((6, 8, 10), np.int16)
    label[:2, :2, :2], label[4, 5:8, 4] = 1, 1  # 24 and 9 mm^3
    for axes, signs in ORIENTATIONS[::7]:
        turned = Grid.of(label.shape, affine_of(axes, signs, SPACING, (5, 6, 7)))
        assert sorted(component_volumes(label == 1, turned)) == pytest.approx([9, 24])
        assert Step("remove_small", "a", 9).apply(label, turned, CLASSES) is label  # none is smaller
        assert Step("remove_small", "a", 9.1).apply(label, turned, CLASSES).sum() == 8


def test_a_removed_component_gets_the_value_of_the_region_around_it():
    label = np.zeros((9, 9, 1), np.int16)
    label[1:8, 1:8] = 1
    label[2:5, 2:5], label[3, 3], label[6, 6], label[2, 6] = 2, 1, 3, 0
    step = Step("keep_largest", "core").apply(label, grid(label), REGIONS)
    assert step[6, 6] == 1  # no longer core or enhancing, but still in the outer region
    assert np.array_equal(np.argwhere(step != label), [[6, 6, 0]])
    assert not Step("remove_small", "outer", 1000).apply(label, grid(label), REGIONS).any()
    filled = Step("fill_holes", "core").apply(label, grid(label), REGIONS)
    assert filled[3, 3] == 2  # a voxel of the outer region alone leaves no region by joining the core
    assert filled[2, 6] == 0
    assert Step("fill_holes", "outer").apply(label, grid(label), REGIONS)[2, 6] == 1
    assert Step("fill_holes", "enhancing").apply(label, grid(label), REGIONS) is label
    label[3, 3] = 3  # enhancing voxels belong to the core: nothing to fill
    assert Step("fill_holes", "core").apply(label, grid(label), REGIONS) is label


def test_the_steps_of_a_file_are_applied_in_their_order(tmp_path):
    label = np.zeros((9, 9, 1), np.int16)
    label[1:6, 1:6], label[3, 3], label[8, 8] = 1, 0, 1
    label[3, 3] = 2  # a voxel of the other class inside
    content = {
        "targets": CLASSES.plain(),
        "steps": [
            {"operation": "remove_small", "label": "b", "min_mm3": 4, "evidence": {"any": "thing"}},
            {"operation": "fill_holes", "label": "a"},
            {"operation": "keep_largest", "label": FOREGROUND},
        ],
        "anything": "else",
    }
    path = tmp_path / "postprocessing.json"
    path.write_text(json.dumps(content))
    steps = read(path)
    processed = steps.apply(label, grid(label), CLASSES)
    assert processed[3, 3] == 1 and processed[8, 8] == 0 and processed.sum() == 25
    assert Steps(steps.steps[::-1], CLASSES).apply(label, grid(label), CLASSES)[3, 3] == 0
    assert [step.plain() for step in steps.steps][1] == {"operation": "fill_holes", "label": "a"}


def test_steps_for_other_classes_are_refused():
    label = np.zeros((4, 4, 4), np.int16)
    other = LabelMapTargets.of_classes(("background", "b", "a"))
    with pytest.raises(ValueError, match=r"made for a=1, b=2; the network has b=1, a=2"):
        Steps((), CLASSES).apply(label, grid(label), other)
    Steps((), CLASSES).apply(
        label, grid(label), LabelMapTargets.of_classes(("background", "a", "b"), ignore=255)
    )


GOOD = {"operation": "remove_small", "label": "a", "min_mm3": 4.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ([], "a list `steps`"),
        ({"steps": {}}, "a list `steps`"),
        ({"steps": [], "targets": None}, "`targets` must give names, values and order"),
        ({"steps": [], "targets": {**CLASSES.plain(), "values": [[1]]}}, "`targets` must give"),
        ({"steps": [], "targets": {**CLASSES.plain(), "values": [[1], [70000]]}}, "`targets` must give"),
        *(
            ({"steps": [], "targets": {**CLASSES.plain(), **odd}}, "`targets` must give")
            for odd in (
                {"values": [[1], [math.inf]]},
                {"values": [[1], [1.9]]},
                {"values": [["1"], [2]]},
                {"values": [[True], [2]]},
                {"values": [[1], [1]]},
                {"values": [[1, 2], [3]]},
                {"names": "ab"},
                {"names": ["a", "a"]},
                {"names": ["a", None]},
                {"kind": "regions", "order": [2, 1]},
                {"ignore": "none"},
                {"ignore": 2},
            )
        ),
        ({"steps": [GOOD, 3]}, "step 2: expected an object"),
        ({"steps": [{"operation": "keep_largest"}]}, "step 1: expected an object with the keys"),
        ({"steps": [{**GOOD, "code": "import os"}]}, "step 1: expected an object with the keys"),
        (
            {"steps": [{**GOOD, "operation": "os.system"}]},
            "`operation` must be one of keep_largest, remove_small, fill_holes",
        ),
        ({"steps": [{**GOOD, "operation": ["keep_largest"]}]}, "`operation` must be one of"),
        ({"steps": [{**GOOD, "label": "c"}]}, "step 1: `label` is 'c', expected one of a, b, or *"),
        ({"steps": [{**GOOD, "label": 1}]}, "`label` must be the name of a class or region"),
        ({"steps": [{**GOOD, "min_mm3": -1}]}, "`min_mm3` must be a positive number, got -1"),
        ({"steps": [{**GOOD, "min_mm3": 10**400}]}, "`min_mm3` must be a positive number, got 1000"),
        ({"steps": [{**GOOD, "min_mm3": True}]}, "`min_mm3` must be a positive number, got True"),
        ({"steps": [{**GOOD, "min_mm3": math.nan}]}, "`min_mm3` must be a positive number, got nan"),
        ({"steps": [{**GOOD, "min_mm3": math.inf}]}, "`min_mm3` must be a positive number, got inf"),
        (
            {"steps": [{"operation": "remove_small", "label": "a"}]},
            "`min_mm3` must be a positive number, got None",
        ),
        (
            {"steps": [{**GOOD, "operation": "keep_largest"}]},
            "`min_mm3` belongs to remove_small, not to keep_largest",
        ),
        (
            {"steps": [{"operation": "fill_holes", "label": "*"}]},
            "fill_holes needs the class or region that fills them",
        ),
    ],
)
def test_a_file_with_invalid_steps_is_refused(content, message, tmp_path):
    path = tmp_path / "steps.json"
    if isinstance(content, dict) and "targets" not in content:
        content = {**content, "targets": CLASSES.plain()}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file"):
        read(tmp_path / "none.json")


def test_components_are_those_of_the_whole_label_map():
    """They cross the borders of slabs."""
    one = model(0, 1.4)
    steps = Steps((Step("keep_largest", "a"),), one.targets)
    array = image().voxels[0]
    plain = Predictor([one])(array, spacing_mm=(1, 1, 1))
    processed = Predictor([one], extras=[PostProcessing(steps)])(array, spacing_mm=(1, 1, 1))
    grid = scores([one], False).crop.grid
    np.testing.assert_array_equal(processed, steps.apply(plain, grid, one.targets))
    assert (processed != plain).any()


def test_of_several_regions_around_a_removed_component_it_gets_the_value_of_the_innermost():
    label = np.ones((9, 9, 1), np.int16)
    label[1:8, 1:8] = 2
    label[2:5, 2:5], label[6, 6] = 3, 3
    removed = Step("keep_largest", "enhancing").apply(label, grid(label), REGIONS)
    assert removed[6, 6] == 2 and (removed != label).sum() == 1
