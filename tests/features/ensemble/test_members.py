"""medconv/features/ensemble: several members by one command, resumed after a kill, that predict as one."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.processes import FORKED, Forked
from helpers.stopped import stopped

from medconv.config import ConfigError, DataConfig, RunConfig, TrainerConfig
from medconv.features.autotune import plan_size
from medconv.features.autotune.plan_size import Timing
from medconv.features.ensemble import gains, members, shares
from medconv.features.ensemble.members import Member, devices_of, members_of
from medconv.inference.load import checkpoints_of
from medconv.inference.predictor import Predictor
from medconv.targets.label_map import LabelMapTargets
from medconv.training.run_dir import RunDir
from medconv.utils.digests import digest
from medconv.utils.exit_codes import BUG, DONE, PREEMPTED, USER

# An epoch, and so a checkpoint, has two steps; with progress lines, the log says where a run resumed.
SETTINGS = ("conv=none", "data.samples_per_epoch=4", "trainer.enable_progress_bar=true")


def ensemble(dataset, folder, *more):
    """The exit code of an ensemble of two, and what it printed."""
    arguments = ["--members", "2", *tiny.overrides(dataset, *SETTINGS), f"run.dir={folder}", *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "subprocess", FORKED)
        return Forked(*arguments, cwd=folder.parent, command="ensemble").wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dataset, the folder of an ensemble of two, and what the command printed."""
    home = tmp_path_factory.mktemp("ensemble")
    dataset = tiny.write_dataset(home / "data/tiny")
    code, printed = ensemble(dataset, home / "run")
    assert code == DONE, printed
    return dataset, home / "run", printed


def weights(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def test_members_differ_by_their_seed_and_the_first_is_the_run_itself(trained, tmp_path):
    dataset, folder, _ = trained
    tiny.train(dataset, tmp_path / "alone", *SETTINGS)
    alone = weights(tmp_path / "alone")
    first = weights(folder)
    second = weights(folder / "members/2")
    assert all(alone[name].equal(first[name]) for name in alone)
    assert not all(first[name].equal(second[name]) for name in first)


def test_the_summary_and_the_table_say_what_each_member_gained(trained):
    _, folder, printed = trained
    summary = json.loads((folder / "summary.json").read_text())
    first, second = summary["members"]
    assert first["score"] == first["score_of_mean"] == summary["val/dice"]
    assert second["folder"] == "members/2"
    assert second["score"] == json.loads((folder / "members/2/summary.json").read_text())["val/dice"]
    assert f"{second['score_of_mean']:.4f}" in printed.splitlines()[-3]
    assert f"medconv predict --checkpoint {folder} " in printed.splitlines()[-1]


def test_the_folder_predicts_as_all_checkpoints_named(trained):
    dataset, folder, _ = trained
    files = [folder / "checkpoints/best.ckpt", folder / "members/2/checkpoints/best.ckpt"]
    assert checkpoints_of(folder) == files
    image = dataset / "imagesTr/case_0.nii.gz"
    _, of_folder = Predictor.load(folder).label_and_probabilities(image)
    _, of_files = Predictor.load(files).label_and_probabilities(image)
    _, of_first = Predictor.load(files[0]).label_and_probabilities(image)
    assert (of_folder == of_files).all()
    assert (of_folder != of_first).any()
    with pytest.raises(ValueError, match=r"members/2/checkpoints/best.ckpt: is named twice, and would"):
        Predictor.load([folder, folder / "members/2"])


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_member_that_was_killed_resumes_to_the_same_weights(number, trained, tmp_path):
    """Killed after three of its four steps, and resumed after two; a member that had ended is left as it is."""
    dataset, folder, _ = trained
    killed = tmp_path / "run"
    if number == 2:
        tiny.train(dataset, killed, *SETTINGS)
    code, printed = ensemble(dataset, killed, stopped(tmp_path / "sent", step=3))
    assert code == USER, printed  # as by too little memory
    with pytest.raises(ValueError, match=r"its training is not done \(status: running\)"):
        checkpoints_of(killed)
    code, printed = ensemble(dataset, killed)
    assert code == DONE, printed
    resumed = killed if number == 1 else killed / "members/2"
    assert "resumed at step 2" in (resumed / "train.log").read_text()
    for name in (".", "members/2"):
        expected = weights(folder / name)
        assert all(value.equal(expected[key]) for key, value in weights(killed / name).items())


def test_a_member_without_a_checkpoint_is_not_left_out(tmp_path):
    for name in ("checkpoints", "members/2/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "members/2/checkpoints/best.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"its training is not done \(no checkpoint\)"):
        checkpoints_of(tmp_path)


def test_each_member_takes_another_fold(dataset):
    config = tiny.checked(dataset, "data.fold=1")
    found = members_of(config, RunDir(Path("run")), ["data=msd"], 3, folds=True)
    assert [member.arguments[-1] for member in found] == ["data.fold=1", "data.fold=2", "data.fold=0"]
    assert [str(member.folder.path) for member in found] == ["run", "run/members/2", "run/members/3"]
    assert found[1].arguments[:3] == ("data=msd", "run.dir='run/members/2'", f"seed={config.seed + 1}")


def test_members_have_the_values_of_vary_in_turn(dataset, tmp_path, monkeypatch, capsys):
    vary = ["--vary", "data.spatial_dims=3,2", "--vary", "conv=none"]
    arguments = [*tiny.overrides(dataset), "run.dry_run=true", f"run.dir={tmp_path}"]
    assert tiny.call(monkeypatch, "ensemble", "--members", "3", *vary, *arguments) == DONE
    lines = capsys.readouterr().out.splitlines()
    for line, dims in zip(lines, "323", strict=True):
        assert f" data.spatial_dims={dims} conv=none " in line


def test_a_network_of_slices_and_one_of_volumes_predict_as_one(dataset, tmp_path):
    code, printed = ensemble(
        dataset, tmp_path / "run", "--vary", "data.spatial_dims=3,2", "model.channels=[4,4]"
    )
    assert code == DONE, printed
    first, second = json.loads((tmp_path / "run/summary.json").read_text())["members"]
    assert second["settings"] == ["data.spatial_dims=2"]
    files = checkpoints_of(tmp_path / "run")
    assert [member.preprocessing.spatial_dims for member in Predictor.load(files).members] == [3, 2]
    assert None not in (first["score"], second["score"], second["score_of_mean"])
    assert printed.splitlines()[-3].endswith("data.spatial_dims=2")


def test_the_commands_of_a_dry_run_train_where_they_are_copied(dataset):
    found = members_of(
        tiny.checked(dataset), RunDir(Path("run")), ["data=msd", "run.dry_run=true"], 2, folds=False
    )
    lines = members.plan(found).splitlines()
    assert [line.split()[:3] for line in lines] == [["medconv", "train", "data=msd"]] * 2
    assert "dry_run" not in members.plan(found)


def test_each_device_trains_one_member(dataset, monkeypatch):
    monkeypatch.setattr(members, "num_cores", lambda: 8)
    config = tiny.checked(dataset, "trainer.devices=2")
    assert devices_of(config) == [{"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}]
    assert "trainer.devices=1" in members_of(config, RunDir(Path("run")), [], 2, folds=False)[0].arguments
    assert devices_of(tiny.checked(dataset)) == [{}]


class Fake(subprocess.Popen[bytes]):
    """Ends with a code that its environment names."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        super().__init__([sys.executable, "-c", f"import os, signal; {command[-1]}"])


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["exit(0)", "exit(0)"], DONE),
        (["exit(1)", "exit(0)"], USER),
        (["exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"], USER),
        (["os.kill(os.getpid(), signal.SIGSEGV)", "exit(1)"], BUG),
    ],
)
def test_the_exit_code_is_that_of_the_first_member_that_failed(ends, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(members.subprocess, "Popen", Fake)
    found = [Member(number, RunDir(tmp_path / str(number)), (end,)) for number, end in enumerate(ends, 1)]
    assert members.train(found, [{}]) == expected


@pytest.mark.parametrize(("has_begun", "started"), [(False, ["1"]), (True, ["1", "2", "3"])])
def test_no_member_follows_one_whose_config_was_refused(has_begun, started, tmp_path, monkeypatch):
    """A run that trains has a summary; where it then fails, other seeds may not."""
    monkeypatch.setattr(members.subprocess, "Popen", Fake)
    run = tmp_path / "run"
    folders = [run, run / "members/2", run / "members/3"]
    ends = [f"open('{tmp_path}/log', 'a').write('{number}\\n')" for number in (1, 2, 3)]
    begins = f"open('{run}/summary.json', 'w').write('x'); " if has_begun else ""
    ends[0] = f"{ends[0]}; {begins}exit(1)"
    pairs = zip(folders, ends, strict=True)
    found = [Member(number, RunDir(path), (end,)) for number, (path, end) in enumerate(pairs, 1)]
    assert members.train(found, [{}]) == USER
    assert (tmp_path / "log").read_text().split() == started
    assert (run / "members/2/checkpoints").is_dir() == has_begun


def test_never_moves_an_earlier_ensemble_aside_once(tmp_path, monkeypatch):
    """Members that begin at once would move each other's folders (each finds that of the run)."""
    started = []

    class Recorded(Fake):
        def __init__(self, command, env):
            started.append(command[-1])
            super().__init__(["exit(0)"], env)

    monkeypatch.setattr(members.subprocess, "Popen", Recorded)
    (tmp_path / "run/members/2").mkdir(parents=True)
    (tmp_path / "run/members/2/mine").touch()
    folders = [tmp_path / "run", tmp_path / "run/members/2"]
    found = [Member(number, RunDir(path, "never"), ()) for number, path in enumerate(folders, 1)]
    assert members.train(found, [{}, {}]) == DONE
    (moved,) = tmp_path.glob("run.*")
    assert (moved / "members/2/mine").is_file() and not (folders[1] / "mine").exists()
    assert started == ["run.resume=auto"] * 2


def test_an_ensemble_that_was_moved_aside_predicts_with_all_its_members(tmp_path):
    run = tmp_path / "run.20261129-101010"  # by run.resume=never
    expected = []
    for folder in (run, run / "members/2", run / "members/2.20261128-101010"):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints/best.ckpt").touch()
        expected.append(folder / "checkpoints/best.ckpt")
    assert checkpoints_of(run) == expected[:2]


def test_members_take_the_folds_of_a_file(tmp_path):
    splits_file = tmp_path / "splits.json"
    splits_file.write_text(json.dumps([{"train": ["a"], "val": ["b"]}] * 3))
    data = DataConfig(splits_file=str(splits_file), fold=2)
    found = members_of(RunConfig(data=data), RunDir(tmp_path), (), 3, folds=True)
    assert [key for member in found for key in member.arguments if key.startswith("data.fold")] == [
        f"data.fold={fold}" for fold in (2, 0, 1)
    ]


def test_each_member_has_the_next_seed_after_that_of_the_config(tmp_path):
    found = members_of(RunConfig(seed=7), RunDir(tmp_path), (), 3, folds=False)
    keys = [key for member in found for key in member.arguments if key.startswith("seed=")]
    assert keys == ["seed=7", "seed=8", "seed=9"]


def test_members_train_on_the_devices_that_the_environment_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,7")
    trainer = TrainerConfig(accelerator="gpu", devices=[2, 1], precision="32-true")
    names = [environment["CUDA_VISIBLE_DEVICES"] for environment in devices_of(RunConfig(trainer=trainer))]
    assert names == ["7", "GPU-5"]


def two_members(home, *validated):
    """Members that have validated these cases of label maps, with the scores 0.5 and 0.25."""
    found = []
    for number, cases in enumerate(validated, 1):
        folder = RunDir(home if number == 1 else home / f"members/{number}")
        folder.checkpoints.mkdir(parents=True)
        folder.best.write_text(f"weights {number}")
        folder.write_summary(
            **{"val/dice": 0.5 / number, "val/cases": {case: {"box": 0.5} for case in cases}},
            targets=LabelMapTargets.of_classes(["background", "box"]).plain(),
        )
        found.append(Member(number, folder, ()))
    return found


def test_the_mean_of_members_that_validated_other_cases_is_not_scored(tmp_path):
    """As by --folds; some networks were trained on the cases of the others."""
    gains.write(two_members(tmp_path, "ab", "bc"), RunConfig(), [])
    rows = json.loads((tmp_path / "summary.json").read_text())["members"]
    assert [(row["score"], row["score_of_mean"]) for row in rows] == [(0.5, None), (0.25, None)]


@pytest.mark.parametrize("number", [1, 2])
def test_the_mean_is_scored_anew_if_any_of_its_members_was_trained_anew(number, tmp_path):
    found = two_members(tmp_path, "ab", "ab")
    earlier = [{"checkpoint": digest(member.folder.best)[:8], "score_of_mean": 0.75} for member in found]
    tmp_path.joinpath("summary.json").write_text(
        json.dumps({**found[0].folder.summary(), gains.KEY: earlier})
    )
    gains.write(found, RunConfig(), [])
    assert found[0].folder.summary()[gains.KEY][1]["score_of_mean"] == 0.75
    found[number - 1].folder.best.write_text("other weights")
    with pytest.raises(ValueError, match=r"checkpoints/best.ckpt: refused"):  # it is predicted with
        gains.write(found, RunConfig(), [])


def test_a_smaller_number_refuses_trained_members_and_forgets_those_that_never_began(tmp_path, monkeypatch):
    monkeypatch.setattr(members.subprocess, "Popen", Fake)
    found = [Member(1, RunDir(tmp_path), ("exit(0)",))]
    waiting = tmp_path / "members/3/checkpoints"
    waiting.mkdir(parents=True)
    (tmp_path / "members/.DS_Store").touch()
    aside = tmp_path / "members/2.20261129-101010/checkpoints"  # by run.resume=never
    aside.mkdir(parents=True)
    (aside / "last.ckpt").touch()
    assert members.train(found, [{}]) == DONE and not waiting.exists()
    waiting.mkdir()
    (waiting / "last.ckpt").touch()
    with pytest.raises(
        ValueError, match=r"members/3 is a member of an earlier start: --members 1 leaves it out"
    ):
        members.train(found, [{}])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data=x", "seed=1", "--config-dir", "mine"], ["data=x", "seed=1", "k=v", "--config-dir", "mine"]),
        (["--config-dir", "mine", "data=x"], ["--config-dir", "mine", "data=x", "k=v"]),
        (["--config-dir", "mine"], ["--config-dir", "mine", "k=v"]),
    ],
)
def test_keys_of_a_member_stand_beside_the_others(arguments, expected):
    """Hydra wants all of them in a row."""
    assert [*members.with_keys(arguments, ["k=v"])] == expected


def test_a_step_is_measured_with_the_threads_of_a_member():
    before = torch.get_num_threads()
    with shares._threads_of_a_member({"OMP_NUM_THREADS": "1"}):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_stop_of_one_member_is_that_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(members.subprocess, "Popen", Fake)
    ends = [f"exit({PREEMPTED})", "signal.pause()", "exit(0)"]
    found = [Member(number, RunDir(tmp_path / str(number)), (end,)) for number, end in enumerate(ends, 1)]
    with pytest.raises(SystemExit) as stopped:
        members.train(found, [{}, {}])
    assert getattr(stopped.value, "number", 0) == signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--members", "1"], "--members must be auto or at least 2, got 1"),
        (["--members", "auto", "--folds"], "--folds needs a number of members, got --members auto"),
        (["--members", "auto"], "shares trainer.max_time among the members, but it is not set"),
        (["--members", "4", "--folds"], "there are 3 folds"),
        (
            ["--members", "2", "--folds", "data.fold=all"],
            "--folds needs the number of a fold, got data.fold=all",
        ),
        (["--members", "2", "run.resume=x.ckpt"], "expected auto or never"),
        (["--members", "2", "trainer.num_nodes=2"], "an ensemble trains on one machine"),
        (["--members", "2", "seed=1,2"], "seed=1,2"),
        (["--members", "2", "--vary", "conv=none,basis,smooth"], "--members 2 leaves out conv=smooth"),
        (
            ["--members", "2", "--vary", "data.spatial_dims=3,7"],
            "data.spatial_dims must be 2, 3 or null, got 7",
        ),
        (["--members", "2", "--vary", "3,2"], "--vary takes KEY=A,B, got 3,2"),
        (["--members", "2", "--vary", "seed=1,2"], "--vary seed=1,2: each member has its own"),
        (["--members", "2", "--vary", "run.name=a,b"], "--vary run.name=a,b: members share the folder"),
        (["--members", "2", "--vary", "data=msd,nnunet"], "members are of one dataset"),
        (["--members", "2", "--vary", "data.regions={w:[box]},null"], "of one dataset and answer the same"),
        (["--members", "2", "--folds", "--vary", "data.fold=0,1"], "--folds gives each member its own"),
        (["--members", "auto", "--vary", "trainer.max_time=00:00:01:00"], "--members auto shares it"),
        (["--members", "2", "trainer.max_epochs=0", "run.dry_run=true"], "trainer.max_epochs=0"),
    ],
)
def test_what_an_ensemble_cannot_be_is_said(arguments, message, dataset, monkeypatch, capsys):
    assert tiny.call(monkeypatch, "ensemble", *tiny.overrides(dataset), *arguments) == USER
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "enough_steps", "devices", "expected"),
    [(30, 1, 1, 1), (110, 1, 1, 1), (120, 1, 1, 2), (6000, 1, 1, 10), (6000, 1, 4, 2), (600, 300, 2, 3)],
)
def test_members_share_the_time_in_which_each_case_is_seen_often(
    seconds, enough_steps, devices, expected, dataset, tmp_path, monkeypatch
):
    """At most 10, of all devices; with a step of 0.5 s, 102 whole patches in batches of 2 fit into a minute: 4 cases are seen 51 times."""
    monkeypatch.setattr(plan_size, "_timed", lambda trial: Timing(0.5, 0.5))
    monkeypatch.setattr(shares, "ENOUGH_STEPS", enough_steps)
    time = f"trainer.max_time=00:{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    more = (time, "schedule.patch=whole", "data.patch_size=[16,18,12]", f"data.cache_dir={tmp_path}")
    assert shares.rounds(tiny.checked(dataset, *more), RunDir(tmp_path / "run"), [{}] * devices) == expected


def test_each_batch_that_a_step_accumulates_is_seen(dataset, tmp_path, monkeypatch):
    """A step of two batches takes twice as long, and sees twice as many cases."""
    monkeypatch.setattr(plan_size, "_timed", lambda trial: Timing(0.25, 0.25))
    monkeypatch.setattr(shares, "ENOUGH_STEPS", 1)
    more = ("schedule.patch=whole", "data.patch_size=[16,18,12]", f"data.cache_dir={tmp_path}")
    found = []
    for batches in (1, 2):
        keys = ("trainer.max_time=00:00:01:00", f"trainer.accumulate_grad_batches={batches}", *more)
        found.append(shares.rounds(tiny.checked(dataset, *keys), RunDir(tmp_path / "run"), [{}]))
    assert found == [2, 2]


def test_there_are_as_many_members_as_the_values_of_vary_need(dataset, tmp_path, monkeypatch, capsys):
    """Two at once, and three values: a second round, also if the time is for one."""
    monkeypatch.setattr(plan_size, "_timed", lambda trial: Timing(0.5, 0.5))
    settings = ("trainer.devices=2", "trainer.max_time=00:00:01:00", f"data.cache_dir={tmp_path}")
    more = (*settings, "run.dry_run=true", f"run.dir={tmp_path}/run")
    vary = ("--vary", "conv=none,basis,smooth")
    arguments = ("--members", "auto", *vary, *tiny.overrides(dataset), *more)
    assert tiny.call(monkeypatch, "ensemble", *arguments) == DONE
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("medconv train")]
    assert [name in line for line in lines for name in ["trainer.max_time=00:00:00:30"]] == [True] * 4
    assert [line.rpartition(" conv=")[2].split()[0] for line in lines] == ["none", "basis", "smooth", "none"]


def test_a_run_that_began_says_by_its_own_time_how_many_members_follow(trained, tmp_path):
    dataset, folder, _ = trained
    begun = shutil.copytree(folder, tmp_path / "run")
    config = tiny.checked(dataset, "trainer.max_time=00:01:00:00")
    with pytest.raises(ConfigError, match=r"its run has no trainer.max_time; --members takes a number"):
        shares.rounds(config, RunDir(begun), [{}])
    path = begun / "config.yaml"
    path.write_text(path.read_text().replace("max_time: null", "max_time: 00:00:20:00"))
    assert shares.rounds(config, RunDir(begun), [{}]) == 3


def test_a_share_of_the_time_is_written_as_the_key_has_it(dataset):
    config = tiny.checked(dataset, "trainer.max_time=02:01:00:00")
    assert [shares.share(config, count) for count in (1, 4)] == ["02:01:00:00", "00:12:15:00"]
