"""medconv/features/joint: a label map and a value of each image, from table and files to both scores."""

import csv
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import small_runs, tiny

import medconv
from medconv.config import flatten
from medconv.data.datasets.tables import case_of_row
from medconv.features.cross_validation.folds import PER_FOLD
from medconv.features.cross_validation.results import CrossValidation
from medconv.features.image_level.losses import CrossEntropy
from medconv.features.image_level.multiclass import MulticlassTargets, OrdinalTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.joint import inference
from medconv.features.joint.layout import joint
from medconv.features.joint.losses import JointLoss
from medconv.features.joint.targets import JointTargets
from medconv.inference.predictor import Predictor
from medconv.targets import Targets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.segmentation import DiceCrossEntropy
from medconv.utils import checkpoint_io
from medconv.utils.errors import ArgumentError
from medconv.utils.exit_codes import DONE, USER

CASES = 12
SHAPE = (16, 18, 12)
CLASSES = MulticlassTargets(("large", "small"))
NUMBERS = RegressionTargets(("age",), (60.0,), (10.0,))


def test_folds_are_compared_by_what_is_not_fitted_to_their_cases():
    targets = JointTargets(("box",), ((1,),), of_image=NUMBERS)
    values = {"derived": {"targets": targets.plain()}}
    fold = SimpleNamespace(config=values, values={})
    expected = JointTargets(("box",), ((1,),), of_image=RegressionTargets(("age",)))
    assert CrossValidation("", "", (fold,)).targets == expected
    fitted = {key for key in flatten(values) if key.endswith(("means", "stds"))}
    assert len(fitted) == 2 and fitted <= set(PER_FOLD)


def write_cases(root):
    """A bright box in each volume, `small` or `large`; the last case is in no row of the table."""
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    lines = ["case,label,volume"]
    for number in range(CASES):
        rng = np.random.default_rng(number)
        name = ("small", "large")[number % 2]
        edge = {"small": 3, "large": 8}[name]
        corner = rng.integers(1, 4, 3)
        label = np.zeros(SHAPE, np.uint8)
        label[tuple(slice(first, first + edge) for first in corner)] = 1
        image = (rng.normal(0, 0.2, SHAPE) + 2 * label).astype(np.float32)
        nib.save(nib.Nifti1Image(image, np.eye(4)), root / f"images/case{number:02}.nii.gz")
        nib.save(nib.Nifti1Image(label, np.eye(4)), root / f"labels/case{number:02}.nii.gz")
        if number < CASES - 1:
            lines.append(f"case{number:02},{name},{label.sum() / 100}")
    (root / "values.csv").write_text("\n".join(lines))
    return root


def words(root, folder, *more):
    """Of a run on these cases."""
    given = {each.split("=")[0] for each in more}
    return [
        "data=joint",
        f"data.root={root}",
        "data.images=images",
        "data.labels=labels",
        f"data.layout.table={root}/values.csv",
        f"data.cache_dir={root}/prepared",
        f"run.dir={root / folder}",
        "optimizer=adamw",
        "optimizer.lr=0.02",
        "data.batch_size=4",
        *(word for word in tiny.SMALL if word.split("=")[0] not in {*given, "data.batch_size"}),
        *more,
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The cases, and a run on them."""
    root = write_cases(tmp_path_factory.mktemp("joint"))
    learning = ("trainer.max_steps=60", "data.samples_per_epoch=120", "model.channels=[8,16]")
    tiny.trained(*words(root, "run", *learning, "callbacks=default"))
    return root


@pytest.fixture(scope="module")
def predictions(root):
    with pytest.MonkeyPatch.context() as patch:
        arguments = ("--checkpoint", root / "run", "--input", root / "images", "--output", root / "predicted")
        assert tiny.call(patch, "predict", *arguments) == DONE
    return root / "predicted"


def rows_of(table):
    with table.open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_a_run_learns_both_and_ranks_by_dice(root):
    summary = json.loads((root / "run/summary.json").read_text())
    assert summary["score"]["name"] == "val/dice"
    assert summary["val/dice"] > 0.6
    assert summary["val/value/auc"] > 0.9
    for row in summary["val/cases"].values():
        assert set(row) == {"dice", "outputs", "values"}
    assert tiny.logged(root / "run", "val/value/accuracy")


def test_pictures_have_the_values_and_their_plots(root):
    tags = small_runs.image_tags(root / "run")
    assert any(tag.startswith("images/val/case") for tag in tags)
    assert "images/val/value_confusion" in tags


def test_predictions_are_label_maps_and_a_table(root, predictions):
    rows = rows_of(predictions / "predictions.csv")
    assert list(rows) == [f"case{number:02}" for number in range(CASES)]
    assert list(rows["case00"]) == ["case", "predicted", "large", "small"]
    label = medconv.load(root / "run")(root / "images/case03.nii.gz")
    np.testing.assert_array_equal(nib.load(predictions / "case03.nii.gz").get_fdata(), label)
    # validation and prediction agree
    for case, row in json.loads((root / "run/summary.json").read_text())["val/cases"].items():
        written = [float(rows[case][name]) for name in CLASSES.names]
        assert written == pytest.approx(row["outputs"], abs=1e-4)


def test_a_stopped_prediction_goes_on_with_a_whole_table(root, predictions, monkeypatch):
    table = (predictions / "predictions.csv").read_text()
    (predictions / "case03.nii.gz").unlink()
    (predictions / "values/case03.json").unlink()
    arguments = ["--checkpoint", root / "run", "--input", root / "images", "--output", predictions]
    assert tiny.call(monkeypatch, "predict", *arguments) == DONE
    assert (predictions / "predictions.csv").read_text() == table


def test_further_images_join_the_table_of_earlier_ones(root, predictions, tmp_path, monkeypatch):
    shutil.copytree(predictions, tmp_path / "predicted")
    (tmp_path / "more").mkdir()
    shutil.copy(root / "images/case01.nii.gz", tmp_path / "more/other.nii.gz")
    folders = ("--input", tmp_path / "more", "--output", tmp_path / "predicted")
    assert tiny.call(monkeypatch, "predict", "--checkpoint", root / "run", *folders) == DONE
    rows = rows_of(tmp_path / "predicted/predictions.csv")
    assert list(rows) == ["other", *(f"case{number:02}" for number in range(CASES))]
    assert {**rows["other"], "case": "case01"} == rows["case01"]


def test_both_are_evaluated_at_once(root, predictions, tmp_path, monkeypatch, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text((root / "values.csv").read_text() + f"\ncase{CASES - 1},,")
    output = tmp_path / "scores.json"
    folders = ["--predictions", predictions, "--references", root / "labels", "--output", output]
    assert tiny.call(monkeypatch, "evaluate", *folders, "--labels", labels) == DONE
    of_maps = json.loads(output.read_text())
    of_table = json.loads((tmp_path / "scores.table.json").read_text())
    assert of_maps["mean"]["dice"] > 0.6
    assert len(of_maps["cases"]) == CASES
    assert of_table["mean"]["auc"] > 0.9
    assert of_table["without_label"] == [f"case{CASES - 1}"]
    assert (tmp_path / "scores.html").is_file()
    assert (tmp_path / "scores.table.html").is_file()
    # each alone gives the same
    table = medconv.evaluate(predictions, labels)
    assert table.mean == of_table["mean"]
    # a case without a row has no values, as in training
    some_rows = tmp_path / "some.csv"
    some_rows.write_text("\n".join(line for line in labels.read_text().splitlines() if line[-2:] != ",,"))
    assert medconv.evaluate(predictions, some_rows).mean == table.mean
    # also by rows that name files of first channels, as training takes them
    rows = list(csv.DictReader(labels.open()))
    lines = [f"imagesTr/{row['case']}_0000.nii.gz,{row['label']}" for row in rows]
    (tmp_path / "paths.csv").write_text("\n".join(["path,label", *lines]))
    assert medconv.evaluate(predictions, tmp_path / "paths.csv").mean == table.mean
    assert medconv.evaluate(predictions, root / "labels").mean["dice"] == of_maps["mean"]["dice"]
    assert tiny.call(monkeypatch, "evaluate", *folders, "--labels", labels, "--split", "val") == USER
    assert "label maps of all splits would be scored beside them" in capsys.readouterr().err
    # a folder without a table, and options of label maps alone
    (predictions.parent / "other").mkdir()
    folders[1] = predictions.parent / "other"
    assert tiny.call(monkeypatch, "evaluate", *folders, "--labels", labels) == USER
    assert "predictions.csv: no such file" in capsys.readouterr().err


CONSTANT = ["scheduler=constant", "weight_averaging=none", "schedule.patch=whole", "data.patch_size=[8,12,8]"]


@pytest.fixture(scope="module")
def whole(root):
    """A second run, of other settings."""
    tiny.trained(*words(root, "whole", *CONSTANT))
    return root / "whole"


def test_a_resumed_run_ends_with_the_same_scores(root, whole):
    tiny.trained(*words(root, "half", *CONSTANT, "trainer.max_steps=2"))
    resumed = f"run.resume={root}/half/checkpoints/last.ckpt"
    tiny.trained(*words(root, "rest", *CONSTANT, resumed))
    last = [checkpoint_io.read(folder / "checkpoints/last.ckpt") for folder in (whole, root / "rest")]
    assert last[0]["medconv"]["validation"] == last[1]["medconv"]["validation"]


def test_an_export_equals_its_network(root, monkeypatch):
    options = ("--checkpoint", root / "run", "--format", "torchscript", "--output", root / "network.ts")
    assert tiny.call(monkeypatch, "export", *options, "--case", root / "images/case01.nii.gz") == DONE
    metadata = json.loads((root / "network.ts.json").read_text())
    assert metadata["parity"]["largest_difference"] < 1e-4
    assert metadata["outputs"]["channels"] == ["background", "1", "large", "small"]
    assert "targets.of_image" in metadata["outputs"]["decode"]


def test_images_that_are_predicted_at_once_keep_their_own_values(root):
    predictor = Predictor.load(root / "run")
    paths = sorted((root / "images").glob("*.nii.gz"))[:4]
    cases = [predictor._input_of([path], None, None) for path in paths]
    one_by_one = [predictor.scores([case])[0].outputs for case in cases]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(lambda case: predictor.scores([case])[0].outputs, cases * 3))
    np.testing.assert_allclose(at_once, one_by_one * 3, rtol=1e-6)


def test_a_mean_of_networks_has_the_mean_of_values_over_all_windows(root, whole, monkeypatch):
    made = []

    class Recorded(inference.MapOutputs):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(inference, "MapOutputs", Recorded)
    image = root / "images/case01.nii.gz"
    checkpoints = [root / "run", whole]
    predictors = [Predictor.load(path) for path in (*checkpoints, checkpoints)]
    case_inputs = [predictor._input_of([image], None, None) for predictor in predictors]
    outputs = [
        predictor.scores([case_input])[0].outputs
        for predictor, case_input in zip(predictors, case_inputs, strict=True)
    ]
    np.testing.assert_allclose(outputs[2], (outputs[0] + outputs[1]) / 2, atol=1e-6)
    of_windows = made[1].of_image
    assert sum(map(len, of_windows)) > 8
    mean = torch.cat(of_windows).mean(0).softmax(0)
    np.testing.assert_allclose(outputs[1], mean, atol=1e-6)


def test_a_mean_of_networks_is_not_exported_as_that_of_their_outputs(root, tmp_path, capsys, monkeypatch):
    shutil.copytree(root / "run", tmp_path / "run")
    shutil.copytree(root / "run", tmp_path / "run/members/2")
    options = ("--checkpoint", tmp_path / "run", "--format", "torchscript", "--output", tmp_path / "mean.ts")
    assert tiny.call(monkeypatch, "export", *options) == USER
    assert "joint networks average their answers, not their outputs" in capsys.readouterr().err
    assert not (tmp_path / "mean.ts").exists()


def test_a_segmentation_starts_the_network_of_both(root, tmp_path, caplog):
    """Its head has other outputs, and starts anew."""
    caplog.set_level("INFO", "medconv")
    run = words(root, str(tmp_path / "map"), "trainer.max_steps=2")
    of_map = [word for word in run if "data.layout.table" not in word and word != "data=joint"]
    tiny.trained("data=folder", *of_map)
    pretrained = f"init.pretrained={tmp_path}/map/checkpoints/best.ckpt"
    tiny.trained(*words(root, str(tmp_path / "both"), "trainer.max_steps=2", pretrained))
    assert "40 of 42 tensors loaded; 2 randomly initialised (head.weight, head.bias)" in caplog.text


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--save-probabilities", "is for label maps of classes; .* predicts joint"),
        ("--quality", "is for label maps of classes; .* predicts joint"),
        ("--saliency", "is for classification and regression; .* predicts joint"),
    ],
)
def test_options_without_effect_are_refused(option, text, root, monkeypatch, capsys):
    arguments = ["--checkpoint", root / "run", "--input", root / "images", "--output", root / "no"]
    assert tiny.call(monkeypatch, "predict", *arguments, option) == USER
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("of_image", "known", "answer"),
    [
        (CLASSES, [1.0], [0.5, 0.5]),
        (MultilabelTargets(("a", "b")), [1.0, 0.0], [0.5, 0.5]),
        (OrdinalTargets(("0", "1", "2")), [2.0], [0.5, 0.0, 0.5]),
        (NUMBERS, [70.0], [60.0]),
    ],
)
def test_any_value_beside_a_label_map(of_image, known, answer):
    """The loss is the sum of both, with a weight; a sample without a value has that of the label map."""
    targets = JointTargets(("box",), ((1,),), of_image=of_image)
    assert Targets.from_plain(json.loads(json.dumps(targets.plain()))) == targets
    loss = FittedLoss(JointLoss(DiceCrossEntropy(), value_weight=3), targets, spatial_dims=2)
    label = torch.randint(2, (2, 1, 8, 8))
    outputs = torch.randn(2, targets.num_outputs, 8, 8)
    outputs[:, 2:] = 0  # standardised
    of_maps = DiceCrossEntropy()(outputs[:, :2], label)
    values = torch.tensor([known, [math.nan] * len(known)])
    value = loss.loss.of(of_image)
    truth = of_image.encode(values[:1])
    of_values = of_image.compare(value, of_image.in_units(torch.zeros(1, of_image.num_outputs)), truth)
    assert float(loss(outputs, label)) == pytest.approx(float(of_maps))
    assert float(loss(outputs, label, values=values)) == pytest.approx(float(of_maps + 3 * of_values))
    assert float(loss(outputs, label, values=values * math.nan)) == pytest.approx(float(of_maps))
    _, pooled = targets.split(outputs)
    assert targets.answer_of_image(pooled)[0].tolist() == pytest.approx(answer)


def test_classes_of_known_values_weigh_as_if_all_had_one():
    """Of 100 cases 40 have a value, 20 of each class: weights are 1, as of 50 and 50."""
    targets = JointTargets(("box",), ((1,),), of_image=CLASSES)
    values = np.full((100, 1), np.nan)
    values[:40, 0] = np.arange(40) % 2
    assert targets.output_counts(values) == [50, 50]


@pytest.mark.parametrize(
    ("name", "ids", "case"),
    [
        ("case00_0000", ["case00"], "case00"),
        ("scan_0000", ["scan_0000", "scan"], "scan_0000"),
        ("a_0000", ["b"], "a_0000"),
    ],
)
def test_rows_by_path_name_the_cases_of_nnunets_files(name, ids, case):
    assert case_of_row(name, ids) == case


def test_losses_that_do_not_fit_are_refused():
    targets = JointTargets(("box",), ((1,),), of_image=NUMBERS)
    with pytest.raises(ValueError, match="DiceCrossEntropy is for .* use loss=joint"):
        FittedLoss(DiceCrossEntropy(), targets, spatial_dims=2)
    with pytest.raises(ValueError, match="loss: L1Loss has no parts for the label map .* use loss=joint"):
        FittedLoss(type("L1Loss", (torch.nn.Module,), {})(), targets, spatial_dims=2)
    with pytest.raises(ValueError, match="JointLoss value is not a mean over samples"):
        FittedLoss(JointLoss(DiceCrossEntropy(), torch.nn.L1Loss(reduction="sum")), targets, 2)
    with pytest.raises(ValueError, match="value_weight must be a number of 0 or more, got -1"):
        JointLoss(DiceCrossEntropy(), value_weight=-1)
    two = JointTargets(("box",), ((1,),), of_image=CLASSES)
    with pytest.raises(ValueError, match="class_weights must be 2 numbers"):
        FittedLoss(JointLoss(DiceCrossEntropy(), CrossEntropy(class_weights=[1, 2, 3])), two, 2)


def test_rare_classes_and_values_of_training_alone_are_doubted():
    targets = JointTargets(("box",), ((1,),), of_image=CLASSES)
    values = np.array([[0.0]] * 19 + [[1.0], [np.nan]])
    assert "1 of 20 training cases have small, so a network" in str(
        targets.check_examples(values, "training")
    )
    with pytest.raises(ValueError, match="no validation case has a value"):
        targets.check_examples(values[-1:], "validation")
    with pytest.raises(ValueError, match="no training case has class small"):
        targets.check_examples(values[:5], "training")
    numbers = JointTargets(("box",), ((1,),), of_image=NUMBERS)
    assert "have the same age" in str(numbers.check_examples(np.full((3, 1), 7.0), "training"))
    assert numbers.fitted(np.array([[1.0], [3.0], [np.nan]])).of_image.plain()["means"] == [2.0]


def test_a_cross_validation_has_both():
    targets = JointTargets(("box",), ((1,),), of_image=CLASSES)
    rows = {
        "a": {"dice": [0.5], "outputs": [0.9, 0.1], "values": [0.0]},
        "b": {"dice": [0.7], "outputs": [0.2, 0.8], "values": [1.0]},
        "c": {"dice": [0.9], "outputs": [0.2, 0.8], "values": None},
    }
    scores = targets.scores.over_folds([rows, rows])
    assert scores["mean"]["dice"] == pytest.approx(0.7)
    assert scores["value"]["mean"]["accuracy"] == 1
    names = [name for name, _ in targets.scores.columns(targets.scores.summary(rows))]
    assert names[:4] == ["box", "mean", "auc", "accuracy"]
    for _, cells in targets.scores.over_folds_lines(scores, 6):
        assert len(cells) == len(names)
    assert targets.scores.case_cells(rows["a"])["output/large"] == 0.9
    assert targets.scores.case_cells(rows["c"]) == {"dice/box": 0.9}


def test_the_value_has_its_mean_over_cases_and_that_over_folds():
    """Two cases are right in one fold, one is wrong in the other."""
    targets = JointTargets(("box",), ((1,),), of_image=CLASSES)
    right = {"dice": [0.5], "outputs": [0.9, 0.1], "values": [0.0]}
    wrong = {**right, "values": [1.0]}
    scores = targets.scores.over_folds([{"a": right, "b": right}, {"c": wrong}])
    names = [name for name, _ in targets.scores.columns(targets.scores.summary({"a": right}))]
    lines = dict(targets.scores.over_folds_lines(scores, 3))
    place = names.index("accuracy")
    assert lines["all cases, mean"][place] == pytest.approx(2 / 3)
    assert lines["mean of folds"][place] == pytest.approx(1 / 2)


def test_a_number_far_off_counts_linearly():
    loss = JointLoss(DiceCrossEntropy()).of(NUMBERS)
    assert float(loss(torch.tensor([[10.0]]), torch.zeros(1, 1))) == pytest.approx(9.5)


@pytest.mark.parametrize(
    ("content", "settings", "text"),
    [
        (None, {}, "values.csv: no such file, expected a table"),
        ("case,grade\ncase00,1", {}, "label_columns: .* has no column 'label', it has case, grade"),
        ("name,label\ncase00,1", {}, "a column 'case' or 'path' is needed"),
        ("case,label\nx,1\ny,2", {}, "no row of a case; it has x, y, the cases are case00"),
        ("case,label\ncase00,1\ncase00,2", {}, "row 3: case case00 is there twice"),
        ("case,label\ncase00,1\ncase00_0000,2", {}, "row 3: case case00 is there twice"),
        ("case,label\ncase00,1\ncase01,1", {}, "column 'label' holds 1, expected two classes"),
        ("case,label\ncase00,1\ncase01,2", {"target_type": "label_map"}, "target_type must be one of"),
    ],
)
def test_a_wrong_table_is_named(content, settings, text, root, tmp_path):
    table = tmp_path / "values.csv"
    if content is not None:
        table.write_text(content)
    with pytest.raises(ValueError, match=text):
        joint(str(table), str(root), "images", "labels", **settings)


def test_grades_in_words_ask_for_the_key_that_takes_them(root, tmp_path):
    (tmp_path / "values.csv").write_text("case,label\ncase00,low\ncase01,high\n")
    where = str(tmp_path / "values.csv"), str(root), "images", "labels"
    with pytest.raises(ArgumentError, match="^value_names is needed: column 'label' holds grades in words"):
        joint(*where, target_type="ordinal")
    assert (
        joint(*where, target_type="ordinal", value_names=["low", "high"]).targets.of_image.names[0] == "low"
    )


@pytest.mark.parametrize("settings", [{"class_names": ["background", "liver"]}, {"modality": "CT"}])
def test_settings_that_the_dataset_itself_has_are_refused(settings, tmp_path):
    dataset = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "box": 1}, "file_ending": ".nii.gz"}
    cases = ("imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz", "imagesTr/b_0000.nii.gz", "labelsTr/b.nii.gz")
    for name in cases:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "dataset.json").write_text(json.dumps({**dataset, "numTraining": 2}))
    table = tmp_path / "values.csv"
    table.write_text("case,label\na,1\nb,2\n")
    same = {"class_names": ["background", "box"], "modality": "MRI"}
    assert joint(str(table), str(tmp_path), **same).class_names == ("background", "box")
    (key,) = settings
    with pytest.raises(ArgumentError, match=f"{key}=.* has no effect, as {tmp_path} names its"):
        joint(str(table), str(tmp_path), **settings)


def test_a_value_that_is_none_is_an_error_of_its_case(root, tmp_path, caplog):
    (tmp_path / "values.csv").write_text("case,label\ncase00,1.5\ncase01,x\nother,2.5\n")
    dataset = joint(str(tmp_path / "values.csv"), str(root), "images", "labels", target_type="regression")
    assert "values.csv, row 3: column 'label' must hold a finite number" in dataset.errors["case01"]
    assert "10 of 12 cases have no value, and train the label map alone" in caplog.text
    assert "rows of 1 cases that the dataset lacks: other" in caplog.text


def test_regions_are_refused(root, tmp_path):
    with pytest.raises(ArgumentError, match="regions is for label maps of classes"):
        joint(str(root / "values.csv"), str(root), "images", "labels").with_targets(regions={"a": ["1"]})
