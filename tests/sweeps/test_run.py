"""Sweeps and cross-validation: stopping and resuming, the summary over folds, choice of post-processing."""

import csv
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers import tiny
from helpers.processes import FORKED, Forked, is_running, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from medconv.cli.entrypoint import guard
from medconv.evaluation import cross_validation, cross_validation_report
from medconv.inference import postprocessing
from medconv.sweeps import run
from medconv.training.run_dir import RunDir
from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER

STEPS = 8
SLOW = [
    f"trainer.max_steps={STEPS}",
    "augmentation._target_=helpers.tiny.SlowAugment",  # a tenth of a second for each step
    "callbacks=none",
]


def by_fold(home: Path) -> dict[str, Path]:
    return {fold.number: fold.folder.path for fold in cross_validation._runs(home)}


@pytest.fixture(scope="module")
def swept(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Three folds, stopped by SIGTERM in the second one and started again with the overrides in another
    order.
    """
    cwd = tmp_path_factory.mktemp("sweep")
    home = cwd / "runs/cv"
    # No key twice: in another order another one would be the last, which counts.
    small = [o for o in tiny.overrides(dataset) if not o.startswith("trainer.max_steps=")]
    arguments = [*small, *SLOW, "run.name=cv", "data.fold=0,1,2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "subprocess", FORKED)
        said = _stopped_and_resumed(arguments, cwd, home)
    return home, said


def _stopped_and_resumed(arguments: list[str], cwd: Path, home: Path) -> str:
    first = Forked("-m", *arguments, cwd=cwd)
    until(lambda: len(list(home.glob("*/checkpoints/last.ckpt"))) == 2 or first.ended())
    os.kill(first.pid, signal.SIGTERM)
    code, said = first.wait()
    assert code == PREEMPTED, said
    assert "stopped by SIGTERM" in said
    jobs = (cwd / "job_pids").read_text().split()
    assert len(jobs) == 2 and not any(is_running(int(pid)) for pid in jobs)  # the third has not begun
    done, stopped = by_fold(home)["0"], by_fold(home)["1"]
    assert set(by_fold(home)) == {"0", "1"}
    assert json.loads((stopped / "summary.json").read_text())["status"] == "preempted"
    before = (done / "checkpoints/last.ckpt").stat().st_mtime_ns
    steps = len(tiny.losses(stopped))
    assert steps > 0
    code, said = Forked("-m", *arguments[::-1], cwd=cwd).wait()
    assert code == DONE, said
    assert (done / "checkpoints/last.ckpt").stat().st_mtime_ns == before
    assert by_fold(home)["1"] == stopped
    # It resumed from its checkpoint, in the same metrics.csv.
    assert STEPS <= len(tiny.losses(stopped)) <= STEPS + steps
    return said


@pytest.fixture
def home(swept: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(swept[0], tmp_path / "runs/cv"))


def summaries(home: Path) -> dict[str, dict[str, Any]]:
    return {number: json.loads((path / "summary.json").read_text()) for number, path in by_fold(home).items()}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_summary_over_folds_is_that_of_all_cases(swept: tuple[Path, str]) -> None:
    home, said = swept
    (found,) = json.loads((home / "cross_validation.json").read_text())["crossvalidations"]
    runs = summaries(home)
    assert [(f["fold"], f["cases"], f["mean"]) for f in found["folds"]] == [
        (number, len(runs[number]["val/cases"]), pytest.approx(runs[number]["val/dice"])) for number in "012"
    ]
    rows = {case: row for number in "012" for case, row in runs[number]["val/cases"].items()}
    assert len(rows) == len(found["cases"]) == 7
    assert {row["case"]: row["dice"] for row in found["cases"]} == rows
    for name in ("box", "hole"):
        values = [row[name] for row in rows.values() if row[name] is not None]
        of_folds = [runs[number]["val/dice_per_class"][name] for number in "012"]
        ours = found["per_class"][name]
        assert ours["dice"] == pytest.approx(np.mean(values)) and ours["sd"] == pytest.approx(
            np.std(values, ddof=1)
        )
        assert ours["mean_of_folds"] == pytest.approx(np.mean(of_folds)) and ours["n"] == len(values)
    assert found["mean"]["dice"] == pytest.approx(
        np.mean([found["per_class"][n]["dice"] for n in ("box", "hole")])
    )
    assert found["mean"]["mean_of_folds"] == pytest.approx(
        np.mean([runs[number]["val/dice"] for number in "012"])
    )
    assert found["missing"] == {} and found["warnings"] == []
    with (home / "folds.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["case"]: float(row["dice/box"]) for row in table} == pytest.approx(
        {c: row["box"] for c, row in rows.items()}
    )
    assert (
        "cross-validation, 3 of 3 folds" in said
        and cross_validation_report.table(cross_validation.read(home)[0]) in said
    )


def test_a_fold_that_is_missing_is_said_with_the_cases_that_count(home: Path) -> None:
    runs = by_fold(home)
    edit(runs["2"] / "summary.json", status="failed")
    shutil.rmtree(runs["0"])
    (found,) = cross_validation.read(home)
    assert found.missing == {"0": "not there", "2": "failed"}
    count = len(summaries(home)["1"]["val/cases"])
    assert (
        f"warning: without fold 0 (not there), 2 (failed): means are over {count} cases of fold 1"
        in cross_validation_report.table(found)
    )
    assert "1 of 3 folds" in cross_validation_report.table(found)
    edit(runs["1"] / "summary.json", status="running")
    assert cross_validation.read(home) == []


def test_a_case_that_two_folds_validated_is_named(home: Path) -> None:
    path = by_fold(home)["2"] / "summary.json"
    other = next(iter(summaries(home)["0"]["val/cases"]))
    edit(path, **{"val/cases": {**summaries(home)["2"]["val/cases"], other: {"box": 0.5, "hole": None}}})
    (found,) = cross_validation.read(home)
    assert f"{other} (fold 0 and 2): validated more than once, and counted as often" in found.warnings
    assert len(found.cases) == 8


def test_a_fold_trained_twice_counts_once_the_later_one(home: Path) -> None:
    first = by_fold(home)["1"]
    shutil.copytree(first, home / "again")
    edit(home / "again/summary.json", **{"val/cases": {"case_9": {"box": 1.0, "hole": 1.0}}})
    (found,) = cross_validation.read(home)
    assert found.warnings == (f"fold 1 was trained twice; again counts, {first.name} does not",)
    assert list(found.folds[1].rows) == ["case_9"]
    (home / "again").rename(home / "again.20260101-000000")  # as run.resume=never moves an earlier run aside
    assert cross_validation.read(home)[0].warnings == ()


def test_folds_of_other_configs_are_not_averaged(home: Path) -> None:
    path = by_fold(home)["2"] / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 7"))
    (found,) = cross_validation.read(home)
    assert [fold.number for fold in found.folds] == ["0", "1"] and found.missing == {"2": "not there"}
    both = cross_validation.read(home, least=1)
    one = next(found for found in both if len(found.folds) == 2)
    assert "fold 2 was trained with another config, and is not counted: seed=0 and 7" in one.warnings


def test_folds_whose_data_was_prepared_in_two_ways_are_warned_of(home: Path) -> None:
    path = by_fold(home)["1"] / "config.yaml"
    path.write_text(path.read_text().replace("  num_channels: 1\n", "  num_channels: 2\n"))
    (found,) = cross_validation.read(home)
    assert found.warnings == (
        "fold 0 and fold 1: the data was preprocessed differently: derived.num_channels=1 and 2",
    )


def rewritten(home: Path, old: str, new: str, folds: str = "012") -> None:
    for number, path in by_fold(home).items():
        if number in folds:
            config = path / "config.yaml"
            assert old in config.read_text()
            config.write_text(config.read_text().replace(old, new))


def test_splits_that_moved_are_said(home: Path) -> None:
    rewritten(home, "  splits_file: null\n", "  splits_file: moved/splits.json\n")
    shutil.rmtree(by_fold(home)["2"])
    (found,) = cross_validation.read(home)
    assert found.warnings == (
        "data.splits_file=moved/splits.json cannot be read, so the number of folds is unknown; some may be "
        "missing",
    )


@pytest.mark.parametrize("names", [("kiste", "hole"), ("hole", "box"), ("box", "hole", "more")])
def test_folds_of_other_classes_are_not_averaged(home: Path, names: tuple[str, ...]) -> None:
    cases = summaries(home)["1"]["val/cases"]
    edit(
        by_fold(home)["1"] / "summary.json",
        **{"val/cases": {case: dict.fromkeys(names, 0.5) for case in cases}},
    )
    (found,) = cross_validation.read(home)
    assert found.missing == {"1": f"other classes: {', '.join(names)}"}
    assert f"warning: without fold 1 (other classes: {', '.join(names)})" in cross_validation_report.table(
        found
    )


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            b"\xff\xfe",
            "[" * 100_000,
            '{"val/dice": "x"}',
            '{"val/cases": []}',
            '{"val/cases": {"a": 1}}',
        ),
        *(
            '{"val/cases": {"a": {"x": "1"}}}',
            '{"val/cases": {"a": {"x": 1}, "b": {"y": 1}}}',
            '{"skipped_cases": [1]}',
        ),
    ],
)
def test_a_summary_that_is_none_is_named(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^{path}: (cannot be read \(|not what medconv writes there)"):
        RunDir(tmp_path).summary()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"\xff\xfe", "not a readable config"),
        (b"data: ${", "not a readable config"),
        (
            b"data: {fold: 0, splits_file: null, num_folds: null}",
            "data.num_folds must be a number of folds, got None",
        ),
        (b"data: {fold: 0, num_folds: 100000}", "data.num_folds must be a number of folds, got 100000"),
        (
            b"data: {fold: /../../precious, num_folds: 5}",
            "data.fold must be `all` or a number, got '/../../precious'",
        ),
        (b"data: {fold: '1*', num_folds: 5}", "data.fold must be `all` or a number, got '1*'"),
    ],
)
def test_a_config_that_is_none_is_named(content: bytes, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_bytes(content)
    with pytest.raises(ValueError) as error:
        cross_validation.read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/run/config.yaml: ") and wanted in str(error.value)


def test_cases_left_out_are_named(home: Path) -> None:
    edit(by_fold(home)["1"] / "summary.json", skipped_cases={"case_8": "broken"})
    assert cross_validation.read(home)[0].warnings == (
        "case_8: skipped by data.on_invalid_case=skip, so not validated",
    )


def test_cross_validations_side_by_side(home: Path) -> None:
    for number, path in by_fold(home).items():
        other = Path(shutil.copytree(path, home / f"other{number}")) / "config.yaml"
        other.write_text(other.read_text().replace("seed: 0", "seed: 7"))
    labels = {home / f"other{number}": "seed=7" for number in "012"}
    found = cross_validation.read(home, labels)
    assert sorted(one.label for one in found) == ["", "seed=7"]
    assert not any(one.warnings for one in found)
    cross_validation_report.write(home, found)
    assert sorted(one.label for one in cross_validation.read(home)) == ["", "seed=7"]  # remembered
    assert "cross-validation, 3 of 3 folds: seed=7" in [
        cross_validation_report.table(one).splitlines()[0] for one in found
    ]


def forked(work: Callable[[], int]) -> int:
    """The process id of a fork that ends with the exit code that `guard` gives."""
    pid = os.fork()
    if pid == 0:
        os.close(2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(guard(work))
    return pid


JOB = """
import pathlib, signal, sys, time
told = []
def note(number, frame):
    told.append(number)
    pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, told)))
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT): signal.signal(number, note)
pathlib.Path(sys.argv[1] + ".begun").touch()
while not told:
    time.sleep(0.02)
time.sleep(0.5)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("number", "all_of_them", "heard", "code"),
    [
        (signal.SIGTERM, False, [signal.SIGTERM], PREEMPTED),
        (signal.SIGUSR1, False, [signal.SIGUSR1], PREEMPTED),
        (signal.SIGINT, False, [signal.SIGTERM], INTERRUPTED),
        (signal.SIGINT, True, [signal.SIGINT, signal.SIGTERM], INTERRUPTED),  # as a terminal sends it
    ],
)
def test_a_stopped_sweep_stops_its_job_and_waits_for_it(
    number: int,
    all_of_them: bool,
    heard: list[int],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never by a second Ctrl-C, for which a run gives up its step."""
    monkeypatch.setattr(run, "_CTRL_C_SECONDS", 0.2)
    told = tmp_path / "told"
    pid = forked(lambda: os.setpgid(0, 0) or run._run_process([sys.executable, "-c", JOB, str(told), "0"]))
    until((tmp_path / "told.begun").exists)
    (os.killpg if all_of_them else os.kill)(pid, number)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code
    assert told.read_text() == " ".join(str(int(one)) for one in heard)


class Short(run.Job):
    """Runs its first override, a line of Python, with its folder as argument."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.overrides[0], str(self.folder.path)]


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (PREEMPTED, PREEMPTED),
        (INTERRUPTED, INTERRUPTED),
        (-signal.SIGUSR1, PREEMPTED),
    ],
)
def test_a_job_that_was_stopped_stops_the_sweep(code: int, ends: int, tmp_path: Path) -> None:
    end = f"raise SystemExit({code})" if code > 0 else f"import os; os.kill(os.getpid(), {-code})"
    both = [Short((end,), (), tmp_path), Short(("import sys; open(sys.argv[1], 'w')",), (), tmp_path)]
    pid = forked(lambda: run.run(both, {}) or DONE)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == ends
    assert not both[1].folder.path.exists()


LOST = (
    "import sys, pathlib as p; f = p.Path(sys.argv[1]); f.mkdir(exist_ok=True); (f / "
    "'error.txt').write_text('gone'); sys.exit(75)"
)


def test_a_job_that_lost_a_process_leaves_the_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [Short((LOST,), (), tmp_path), Short(("pass",), (), tmp_path)]
    run.run(both, {})
    assert [job.code for job in both] == [PREEMPTED, DONE]
    assert run.finish(both) == PREEMPTED and "failed, exit code 75: gone\n" in capsys.readouterr().out


def test_equal_jobs_are_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They share a folder."""
    count = "import sys; open(sys.argv[1] + '.count', 'a').write('x')"
    same = [Short((count,), (), tmp_path) for _ in range(3)]
    run.run(same, {})
    assert same[0].folder.path.with_suffix(".count").read_text() == "x" and [job.code for job in same] == [
        0,
        0,
        0,
    ]
    assert run.plan(same, {}).count("medconv train") == 1
    run.finish(same)
    assert capsys.readouterr().out.count(f"  -     {same[0].folder.path}") == 1


def test_a_job_that_the_system_killed_is_said_to_be() -> None:
    code = run._run_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert run.Job((), (), Path("runs/x"), code).reason == "killed by SIGKILL"
    assert run._exit_code(code) == USER
    assert run._exit_code(-signal.SIGSEGV) == BUG


def test_a_job_takes_its_config_where_the_sweep_takes_it(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--config-name`, `--config-dir` and a search path of the user's own, whose option fails in the job."""
    monkeypatch.setattr(run, "subprocess", FORKED)
    own, more = tmp_path / "own", tmp_path / "more"
    (more / "perf").mkdir(parents=True)
    (more / "perf/mine.yaml").write_text("matmul_precision: low\n")
    own.mkdir()
    lines = ["defaults:", "  - train", "  - override perf: mine", "  - _self_", "hydra:", "  mode: MULTIRUN"]
    (own / "mine.yaml").write_text("\n".join(lines) + "\n")
    given = ["--config-dir", str(own), "--config-name", "mine", f"hydra.searchpath=[file://{more}]"]
    code, said = Forked(*given, *tiny.overrides(dataset), "data.fold=0", cwd=tmp_path).wait()
    reason = "perf.matmul_precision must be highest, high or medium, got 'low'"
    assert code == USER and said.count(f"error: {reason}") == 1, said
    assert f"failed, exit code 1: {reason}\n" in said


@pytest.mark.parametrize("many", [True, False])
def test_a_dry_run_shows_what_would_be_run(many: bool, dataset: Path, tmp_path: Path) -> None:
    arguments = [*tiny.overrides(dataset), "run.name=planned", "run.dry_run=true"]
    code, said = Forked(*(["-m", "seed=1,2"] if many else []), *arguments, cwd=tmp_path).wait()
    assert code == DONE and not (tmp_path / "runs/planned").exists(), said
    if many:
        first, second = said.splitlines()
        assert first.startswith("medconv train ") and " seed=1 " in first and " seed=2 " in second
        assert "run.dry_run" not in said and "run.dir=" in first
    else:
        assert said.startswith("# runs/planned\n") and "max_steps: 4" in said


def test_the_hparams_page_shows_what_tells_the_runs_apart(swept: tuple[Path, str]) -> None:
    seen = {}
    for number, path in by_fold(swept[0]).items():
        events = EventAccumulator(str(path / "tensorboard")).Reload()
        data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        seen[number] = dict(HParamsPluginData.FromString(data).session_start_info.hparams)
        score = json.loads((path / "summary.json").read_text())["val/dice"]
        assert events.Scalars("hparams/val_dice")[-1].value == pytest.approx(score)
    assert {number: {k: v.number_value for k, v in page.items()} for number, page in seen.items()} == {
        number: {"data.fold": float(number)} for number in "012"
    }


# Post-processing by cross-validation.


def postprocess(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return tiny.call(monkeypatch, "find-postprocessing", *arguments)


def test_postprocessing_is_decided_on_cases_not_trained_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert postprocess(monkeypatch, "--runs", str(home)) == DONE
    said = capsys.readouterr()
    assert "Dice over 7 cases" in said.out and "warning" not in said.out + said.err  # validation's own Dice
    assert "keep_largest" in said.out and "steps kept: " in said.out
    best = " ".join(str(path / "checkpoints/best.ckpt") for _, path in sorted(by_fold(home).items()))
    assert f"medconv predict --checkpoint {best} --postprocess {home}/postprocessing.json --input" in said.out
    content = json.loads((home / "postprocessing.json").read_text())
    steps = postprocessing.read(home / "postprocessing.json")
    assert steps.targets.names == ("box", "hole")
    assert len(content["steps"]) + len(content["rejected"]) >= 9
    assert all(
        {"difference", "low", "high", "p", "before", "after"} <= set(e["evidence"])
        for e in content["rejected"]
    )
    predictions = {path: path.stat().st_mtime_ns for path in home.glob("validation/*/*.nii.gz")}
    assert len(predictions) == 7
    for number, summary in summaries(home).items():
        there = sorted(
            p.name.removesuffix(".nii.gz") for p in home.glob(f"validation/fold{number}-*/*.nii.gz")
        )
        assert there == sorted(summary["val/cases"])
    next(iter(predictions)).unlink()
    assert postprocess(monkeypatch, "--runs", str(home)) == DONE
    again = {path: path.stat().st_mtime_ns for path in home.glob("validation/*/*.nii.gz")}
    assert set(again) == set(predictions)
    assert sum(again[path] == predictions[path] for path in again) == 6  # done once


def test_predictions_of_an_earlier_checkpoint_are_not_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what a replaced checkpoint gives is not what training found."""
    runs = by_fold(home)
    case = next(iter(summaries(home)["0"]["val/cases"]))
    stale = home / "validation/fold0-00000000"
    stale.mkdir(parents=True)
    nib.save(nib.Nifti1Image(np.zeros((16, 18, 12), np.uint8), np.eye(4)), stale / f"{case}.nii.gz")
    edit(runs["0"] / "summary.json", **{"val/cases": {case: {"box": 0.999, "hole": 0.999}}})
    assert postprocess(monkeypatch, "--runs", str(home)) == DONE
    assert not stale.exists()
    assert f"warning: Dice of 1 cases differs from that in training: {case}" in capsys.readouterr().out


def test_a_run_folder_names_no_code_and_no_folder_to_delete(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(wanted: str, *arguments: str) -> None:
        assert postprocess(monkeypatch, "--runs", str(home), *arguments) == USER
        said = capsys.readouterr().err
        assert said.count("error:") == 1 and "Traceback" not in said and wanted in said

    fails("--device quantum: cannot be used here", "--device", "quantum")
    spoilt = Path(shutil.copytree(home, tmp_path / "spoilt"))
    root = next(
        line
        for line in (by_fold(home)["0"] / "config.yaml").read_text().splitlines()
        if line.startswith("    root:")
    )
    call = "{_target_: builtins.open, file: " + str(tmp_path / "hit") + ", mode: w}"
    for value, wanted in (
        (f"[{call}]", "data.layout.root[0]._target_=builtins.open is refused: a layout takes plain values"),
        (call, "data.layout: medconv.data.datasets.decathlon.msd cannot be called with"),
        ("[1]", "data.layout: medconv.data.datasets.decathlon.msd cannot be called with"),
    ):
        rewritten(home, root, f"    root: {value}")
        fails(wanted)
        assert not (tmp_path / "hit").exists()
        shutil.rmtree(home)
        shutil.copytree(spoilt, home)
    rewritten(home, "medconv.data.datasets.decathlon.msd", "medconv.data.datasets.common.class_names_of")
    rewritten(home, root, root.replace("    root: ", "    root: !!python/name:os.system "))
    fails("not a readable config")
    shutil.rmtree(home)
    shutil.copytree(spoilt, home)
    precious = tmp_path / "precious"
    for folder in (precious, home / "validation/fold0-notours", home / "validation/fold0-0123abcd"):
        folder.mkdir(parents=True)
    (home / "validation/fold0-00000000").symlink_to(precious)
    assert postprocess(monkeypatch, "--runs", str(home)) == DONE
    assert precious.exists() and (home / "validation/fold0-notours").exists()
    assert not (home / "validation/fold0-0123abcd").exists()


def test_what_postprocessing_needs_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*arguments: str) -> str:
        assert postprocess(monkeypatch, *arguments) == USER
        said = capsys.readouterr().err
        assert said.count("error:") == 1 and "Traceback" not in said
        return said

    runs = by_fold(home)
    assert "no folds of a cross-validation there" in fails("--runs", str(tmp_path / "nowhere"))
    best = runs["1"] / "checkpoints/best.ckpt"
    best.rename(best.with_suffix(".away"))
    assert f"{best}: no such checkpoint; it is needed to predict fold 1" in fails("--runs", str(home))
    best.with_suffix(".away").rename(best)
    edit(runs["1"] / "summary.json", status="failed")
    assert "fold 1 (failed) is missing; each must be trained to its end" in fails("--runs", str(home))
    edit(runs["1"] / "summary.json", status="done")
    config = runs["0"] / "config.yaml"
    whole = config.read_text()
    config.write_text(whole.replace("medconv.data.datasets.decathlon.msd", "os.path.join"))
    assert "is missing; each must" in fails("--runs", str(home))  # another config than the other folds'
    for path in runs.values():
        text = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(text.replace("medconv.data.datasets.decathlon.msd", "os.path.join"))
    assert "data.layout._target_=os.path.join is refused" in fails("--runs", str(home))
    for path in runs.values():
        (path / "config.yaml").write_text(
            (path / "config.yaml").read_text().replace("os.path.join", "medconv.data.datasets.decathlon.msd")
        )
    lost = {**summaries(home)["2"]["val/cases"], "case_99": {"box": 1.0, "hole": 1.0}}
    edit(runs["2"] / "summary.json", **{"val/cases": lost})
    assert "it lacks 1 of 8 cases: case_99" in fails("--runs", str(home))
    for number, path in runs.items():
        other = Path(shutil.copytree(path, home / f"other{number}")) / "config.yaml"
        other.write_text(other.read_text().replace("seed: 0", "seed: 7"))
    assert "more than one cross-validation there; choose by --select" in fails("--runs", str(home))
    assert "none of them is --select 'seed=8'" in fails("--runs", str(home), "--select", "seed=8")
