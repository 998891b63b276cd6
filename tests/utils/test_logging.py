"""What a user meets on the command line: bad input in one message and exit code 1, sweeps, exit codes,
trust.
"""

import csv
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import tiny

from medconv.training import run
from medconv.utils import checkpoint_io as checkpoint_file
from medconv.utils.exit_codes import DONE, USER


@pytest.fixture(scope="module")
def checkpoint(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "done"
    tiny.train(dataset, folder)
    return folder / "checkpoints/best.ckpt"


def fails(
    command: str,
    arguments: list[str],
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run a command in this process; it must exit with 1 and say one thing, without a traceback."""
    monkeypatch.chdir(cwd)
    code = tiny.call(monkeypatch, command, *arguments)
    said = capsys.readouterr().err
    assert code == USER, said
    assert "Traceback" not in said
    assert said.count("error:") == 1, said
    return said


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("data.bach_size=2", "there is no key data.bach_size; did you mean data.batch_size"),
        ("+data.bach_size=2", "data.bach_size"),
        ("trainer.max_step=3", "did you mean trainer.max_steps"),
        ("data.batch_size=many", "data.batch_size"),
        (
            "model=resnext",
            "customconv densenet dynunet efficientnet encoder flexibleunet resnet segresnet senet unet",
        ),
        ("perf=turbo", "turbo"),
        ("conv=magic", "magic"),
        ("model._target_=monai.networks.nets.Unet2", "model._target_=monai.networks.nets.Unet2"),
        ("model.norm=layer", "norm must be one of ['batch', 'instance'], got 'layer'"),
        ("model.kernel_size=4", "kernel_size must be odd"),
        ("data.patch_size=[15,16,12]", "data.patch_size=[15, 16, 12]"),
        ("data.patch_size=[16,16]", "data.patch_size needs 3 positive numbers"),
        ("data.spacing_mm=[1,1,0]", "data.spacing_mm needs 3 positive numbers"),
        ("data.normalisation=histogram", "data.normalisation must be one of"),
        ("plan.memory_gb=0", "plan.memory_gb must be a positive number of GB, got 0.0"),
        (
            "plan.memory_gb=0.001",
            "plan.memory_gb: the smallest patch, 16 x 16 x 12 voxels, in a batch of 2 takes some 0.037 GB",
        ),
        (
            "plan.strides=[[2,2]]",
            "plan.strides needs 3 whole numbers of 1 or more for each step between stages, got [[2, 2]]",
        ),
        (
            "plan.strides=[2] data.patch_size=[15,16,12]",
            "data.patch_size must be divisible by (2, 2, 2) (plan.strides), got",
        ),
        ("plan.kernel_sizes=[3,2]", "plan.kernel_sizes needs 3 odd numbers for each of 2 stages, got [3, 2]"),
        ("plan.kernel_sizes=3", "plan.kernel_sizes needs 3 odd numbers for each of 3 stages, got 3"),
        (
            "plan.max_stages=2 plan.strides=[2,2,2]",
            "plan.strides=[2, 2, 2] makes 4 stages, plan.max_stages allows 2",
        ),
        (
            "plan.channels=[8,8,8,8]",
            "plan.channels needs one number of 1 or more for each of 3 stages, got [8, 8, 8, 8]",
        ),
        ("plan.max_stages=0", "plan.max_stages must be 1 or more, or null, got 0"),
        ("plan.max_batch_size=0", "plan.max_batch_size must be 1 or more, or null, got 0"),
        ("plan.memory=8", "there is no key plan.memory; did you mean plan.memory_gb"),
        ("data.fold=7", "data.fold must be `all` or lie in 0..2, got 7"),
        ("data.fold=first", "data.fold"),
        (
            "scheduler=step scheduler.step_fraction=30",
            "scheduler: every must lie between 0 and 1, got 30 (given warmup_steps=30",
        ),
        ("scheduler=cosin", "constant cosine exponential multi_step one_cycle plateau poly step"),
        ("data.num_folds=100", "data.num_folds"),
        ("data.batch_size=0", "data.batch_size must be at least 1, got 0"),
        ("data.persistent_workers=true", "data.persistent_workers=true needs workers"),
        ("data.spatial_dims=4", "data.spatial_dims must be 2, 3 or null (what the data has), got 4"),
        (
            "data.spatial_dims=2 data.patch_size=[16,16,12]",
            "data.patch_size needs 2 positive numbers, one per spatial axis",
        ),
        (
            "data.flip_label_pairs=[[box,hol]]",
            "data.flip_label_pairs: hol is no class of the foreground; did you mean hole?",
        ),
        (
            "data.flip_label_pairs=[[box,background]]",
            "data.flip_label_pairs: background is no class of the foreground",
        ),
        ("data.flip_label_pairs=[box,hole]", "data.flip_label_pairs needs pairs of two different classes"),
        (
            "data.flip_label_pairs=[[box,hole],[hole,box]]",
            "data.flip_label_pairs: a class has one partner, box, hole has more",
        ),
        (
            "data.flip_label_pairs=[[box,hole]] conv=mirror",
            "cannot tell box from hole (data.flip_label_pairs)",
        ),
        (
            "data.regions={both:[1,9]}",
            "data.regions: both must name different label values of 1 to 2: 9 is none of the",
        ),
        ("data.regions={both:[box,hle]}", "data.regions: both: hle is no class; did you mean hole?"),
        (
            "data.regions={both:[1,2],hole:2}",
            "data.regions_order is needed, as both and hole overlap: for each of ['both'",
        ),
        (
            "data.regions={both:[1,2],hole:2} data.regions_order=[1]",
            "data.regions_order must give each of ['both', 'hole']",
        ),
        ("data.regions_order=[1,2]", "data.regions_order=[1, 2] needs data.regions, which is not set"),
        ("data.regions=both", "data.regions"),
        (
            "data.ignore_label=1",
            "data.ignore_label must be above all classes, from 2 (hole, which then is no class) to 32767, "
            "got 1",
        ),
        (
            "data.flip_label_pairs=[[box,hole]] data.regions={all:[1,2]}",
            "data.flip_label_pairs exchanges classes, and this run has regions",
        ),
        (
            "data.ignore_label=9 loss=tversky loss.batch=false",
            "use loss.batch=true if it has that argument, or loss=dice_ce",
        ),
        (
            "data.regions={a:1,b:2} loss=tversky loss.to_onehot_y=true",
            "loss: TverskyLoss cannot take overlapping regions, one mask each",
        ),
        ("data.prepare_workers=0", "data.prepare_workers must be at least 1, got 0"),
        ("data.on_invalid_case=ignore", "data.on_invalid_case must be raise or skip, got ignore"),
        ("data.root=nowhere", "data.root=nowhere: no such folder"),
        ("data.root=null", "data.root is not set"),
        ("data.splits_file=nowhere.json", "nowhere.json"),
        ("trainer.max_time=20min", "trainer.max_time must be written DD:HH:MM:SS"),
        ("trainer.precision=bf17", "bf17"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed"),
        ("trainer.accelerator=quantum", "quantum"),
        ("trainer.accelerator=cuda", "trainer.accelerator=cuda: no GPU is visible here"),
        ("trainer.strategy=dpp", "dpp"),
        ("perf.activation_checkpointing=all", "perf.activation_checkpointing must be one of"),
        ("perf.matmul_precision=low", "perf.matmul_precision must be highest, high or medium, got 'low'"),
        ("perf.stop_sync_interval=0", "perf.stop_sync_interval must be at least 1, got 0"),
        ("perf.cuda_graphs=true", "perf.cuda_graphs=true needs perf.compile=true"),
        ("perf.compile=maybe", "perf.compile: Value 'maybe' is not a valid bool"),
        ("perf=autotune perf.auto_seconds=0", "perf.auto_seconds must be positive, got 0"),
        ("trainer.devices=4096", "trainer.devices=4096: this machine has"),
        (
            "trainer.num_nodes=2",
            "trainer.num_nodes=2, but this process was started alone, on 1 machine; start it on all of",
        ),
        ("perf.timeout_seconds=0", "perf.timeout_seconds must be positive, got 0"),
        ("trainer.devices=0", "trainer.devices=0: on a CPU it is a number of processes"),
        (
            "trainer.strategy=fsdp perf.activation_checkpointing=pointwise",
            "take perf.activation_checkpointing=blocks",
        ),
        ("optimizer.lr=-1", "optimizer: lr must be 0 or more, got -1 (given lr=-1, weight_decay=0.01)"),
        ("optimizer.lr=fast", "optimizer: lr must be a number, got fast (given lr=fast, weight_decay=0.01)"),
        ("+optimizer.betas=[0.9]", "optimizer: betas must be two numbers, got [0.9] (given"),
        (
            "optimizer=adamw +optimizer.betas=[0.9]",
            "optimizer: list index out of range (given lr=0.002, weight_decay=0.01, betas",
        ),
        ("loss.ce_weight=a", "loss: ce_weight must be a number of 0 or more, got a"),
        (
            "loss._target_=torch.nn.CrossEntropyLoss ~loss.dice_weight ~loss.ce_weight",
            "loss: CrossEntropyLoss cannot take classes, as a label map (batch, 1, x, y, z): Expected target "
            "size",
        ),
        ("task.deep_supervision=maybe", "task.deep_supervision must be true or false, got maybe"),
        ("optimizer.momentum=0.9", "momentum"),
        ("task.overlap=1.5", "task.overlap"),
        ("augmentation.scale=2", "augmentation.scale must be a range [low, high] from 0.01 upwards, got [2]"),
        ("seed=-1", "seed must be 0 or more, got -1"),
        ("task.mirror_axes=0", "task.mirror_axes must be different spatial axes from 0 to 2, got 0"),
        ("task.sw_batch_size=1.5", "task.sw_batch_size must be a whole number of at least 1, got 1.5"),
        (
            "data.flip_label_pairs=[1,2]",
            "data.flip_label_pairs needs pairs of two different classes, such as [[left, right]], got [1, 2]",
        ),
        (
            "data.normalisation=3",
            "data.normalisation must be one of ('zscore', 'ct', 'dataset', 'rescale', 'none') per channel, "
            "got [3]",
        ),
        (
            "data.spacing_mm=[inf,1,1]",
            "data.spacing_mm needs 3 positive numbers, one per spatial axis, got [inf, 1.0, 1.0]",
        ),
        ("augmentation.p.noise=2", "augmentation.p gives probabilities from 0 to 1 of rotation, scale"),
        ("+augmentation.p.twist=1", "got ['twist']"),
        (
            "augmentation=strong augmentation.p.elastic=1 augmentation.elastic_mm=30",
            "augmentation.elastic_mm must be at most 0.4 of",
        ),
        ("conv=transform conv.where=nothing_is_called_so", "conv: no convolution of UNet could be swapped"),
        ("conv=mirror conv.axes=[3]", "conv: axes must lie below 3, the image's spatial axes, got [3]"),
        ("conv=mirror conv.axes=[]", "conv: axes must be different spatial axes, counted from 0, got []"),
        ("conv=mirror model.channels=[6,7]", "conv: layer"),
        ("conv=ball conv.radius_mm=0", "conv: layer encoder.0.0: radius_mm must be positive, got 0"),
        (
            "conv=basis conv.bank=wavelets",
            "conv: layer encoder.0.0: bank must be one of ['gabor', 'jet', 'laplacian', 'lines']",
        ),
        (
            "conv=basis conv.spacing_mm=[1,0,1]",
            "conv: spacing_mm must be positive along every axis, got (1, 0, 1)",
        ),
        ("conv=spacing conv.spacing_mm=null", "conv: layer encoder.0.0: spacing_mm is needed"),
        (
            "conv=masked conv.mask=[[1,1],[1,1]]",
            "conv: layer encoder.0.0: mask must have shape kernel_size = (3, 3, 3)",
        ),
        ("conv=bottleneck conv.ratio=2", "conv: layer encoder.0.0: ratio must lie in (0, 1], got 2"),
        ("conv=se conv.reduction=0", "conv: layer encoder.0.0: reduction must be at least 1, got 0"),
        (
            "augmentation.mirror_axes=[3]",
            "augmentation.mirror_axes must be different spatial axes from 0 to 2, or `all`, got [3]",
        ),
        (
            "task.mirror_axes=[0]",
            "task.mirror_axes=[0] needs a network that knows mirrored images: add [0] to "
            "augmentation.mirror_axes",
        ),
        (
            "task.mirror_axes=[0,0] augmentation.mirror_axes=[0]",
            "task.mirror_axes must be different spatial axes from 0 to 2, got [0, 0]",
        ),
        ("run.resume=sometimes", "run.resume must be auto, never or a checkpoint"),
        ("run.checkpoint_interval=soon", "run.checkpoint_interval must be written DD:HH:MM:SS"),
        ("init.pretrained=nowhere.ckpt", "nowhere.ckpt: no such checkpoint"),
        ("loss._target_=torch.nn.CrossEntropyLos", "loss._target_"),
        ("scheduler.power=2", "power"),
    ],
)
def test_bad_configuration(
    override: str,
    wanted: str,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.is_available() and "cuda" in override:
        pytest.skip("there is a CUDA device here")
    said = fails(
        "train",
        [*tiny.overrides(dataset), *override.split(), f"run.dir={tmp_path / 'run'}"],
        tmp_path,
        monkeypatch,
        capsys,
    )
    assert wanted in said


def test_faults_of_a_dataset_are_listed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tiny.write_dataset(tmp_path / "damaged")
    whole = (root / "imagesTr/case_1.nii.gz").read_bytes()
    (root / "imagesTr/case_1.nii.gz").write_bytes(whole[: len(whole) // 2])
    (root / "labelsTr/case_3.nii.gz").unlink()
    (root / "imagesTr/case_5.nii.gz").write_bytes(b"")
    said = fails(
        "train", [*tiny.overrides(root), f"run.dir={tmp_path / 'run'}"], tmp_path, monkeypatch, capsys
    )
    assert "3 faults in 7 cases" in said
    for case, file in (
        ("case_1", "imagesTr/case_1"),
        ("case_3", "labelsTr/case_3"),
        ("case_5", "imagesTr/case_5"),
    ):
        assert f"case {case}: " in said
        assert f"{file}.nii.gz" in said


def test_a_sweep_leaves_a_folder_per_job_and_survives_a_failed_one(dataset: Path, tmp_path: Path) -> None:
    arguments = tiny.overrides(
        dataset, "trainer.max_steps=2", "data.samples_per_epoch=4", "trainer.limit_val_batches=1"
    )
    sweep = ["model.norm=batch,nonsense", "run.name=both"]
    done = tiny.command("train.py", "-m", *arguments, *sweep, cwd=tmp_path)
    assert done.returncode == USER, done.stderr
    assert "norm must be one of" in done.stderr
    folders = [p for p in (tmp_path / "runs/both").iterdir() if p.is_dir()]
    assert len(folders) >= 1
    (summary,) = [json.loads(p.read_text()) for p in (tmp_path / "runs/both").glob("*/summary.json")]
    assert summary["status"] == "done"
    assert "sweep, best first" in done.stdout
    reason = "exit code 1: model: norm must be one of ['batch', 'instance'], got 'nonsense'"
    assert f"model.norm=nonsense  failed, {reason}\n" in done.stdout
    with (tmp_path / "runs/both/sweep.csv").open(newline="") as file:
        best, failed = csv.DictReader(file)
    assert best["model.norm"] == "batch" and float(best["val/dice"]) == summary["val/dice"]
    assert float(best["val/dice/box"]) == summary["val/dice_per_class"]["box"] and best["val/dice/hole"]
    assert (
        best["steps"] == "2"
        and best["status"] == "done"
        and Path(best["folder"]) in [p.relative_to(tmp_path) for p in folders]
    )
    assert float(best["samples_per_second"]) == summary["samples_per_second"] and best["wall_seconds"]
    assert (failed["status"], failed["reason"], failed["val/dice"]) == ("failed", reason, "")


def test_a_sweep_over_two_processes_each(dataset: Path, tmp_path: Path) -> None:
    """Lightning starts the second process from the command line: the sweep must not start over in it."""
    arguments = tiny.overrides(dataset, "trainer.max_steps=2", "trainer.devices=2", "trainer.strategy=ddp")
    done = tiny.command("train.py", "-m", *arguments, "seed=1,2", "run.name=pairs", cwd=tmp_path)
    assert done.returncode == DONE, done.stderr
    summaries = [json.loads(p.read_text()) for p in (tmp_path / "runs/pairs").glob("*/summary.json")]
    assert [s["status"] for s in summaries] == ["done", "done"]
    assert [s["hardware"]["devices"] for s in summaries] == [2, 2]


def test_a_run_does_not_go_on_with_other_cases(dataset: Path, tmp_path: Path) -> None:
    """A case that was skipped and then mended would change what every sample number means."""
    folder = tmp_path / "data" / "tiny"
    shutil.copytree(dataset, folder)
    (broken := folder / "imagesTr/case_1.nii.gz").write_bytes(b"")
    first = tiny.train(folder, tmp_path / "run", "data.on_invalid_case=skip")
    assert list(first["skipped_cases"]) == ["case_1"]
    shutil.copy(dataset / "imagesTr/case_1.nii.gz", broken)
    with pytest.raises(
        ValueError,
        match=r"run of another config.*\n(.*\n)*  facts\.train_cases: \d cases, \w+ there, \d cases, \w+ now",
    ):
        tiny.train(folder, tmp_path / "run", "data.on_invalid_case=skip", "trainer.max_steps=8")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_give_the_result_of_one(dataset: Path, tmp_path: Path, strategy: str) -> None:
    """With heads of deep supervision. By gradient descent: AdamW makes a step of full length of a gradient
    that is but rounding.
    """
    same = ["model.norm=instance", "data.samples_per_epoch=12", "trainer.max_steps=6", "optimizer=sgd"]
    same += [
        "task.deep_supervision=true",
        "model.channels=[4,6,8,8]",
        "model.strides=[2,2,2]",
        "data.patch_size=[16,16,16]",
    ]
    one = tiny.train(dataset, tmp_path / "one", *same, "data.batch_size=4")
    arguments = tiny.overrides(
        dataset, *same, "data.batch_size=2", "trainer.devices=2", f"trainer.strategy={strategy}"
    )
    done = tiny.command("train.py", *arguments, f"run.dir={tmp_path / 'two'}", cwd=tmp_path)
    assert done.returncode == DONE, done.stderr
    assert "global batch 4" in done.stdout
    assert "warning" not in done.stderr
    two = json.loads((tmp_path / "two/summary.json").read_text())
    assert two["steps"] == one["steps"] == 6
    assert sorted(two["val/cases"]) == sorted(one["val/cases"])  # each case once, on whichever rank
    states = [
        torch.load(tmp_path / n / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for n in ("one", "two")
    ]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-5)
    assert two["val/dice"] == pytest.approx(one["val/dice"], abs=1e-3)


@pytest.mark.parametrize(
    ("target", "group"),
    [
        ("os.system", "model"),
        ("torch.nn.parallel.distributed.os.system", "model"),
        ("subprocess.run", "conv"),
        ("torch.hub.load", "model"),
        ("medconv.evaluation.segmentation.write", "conv"),
    ],
)
def test_a_checkpoint_cannot_choose_code(checkpoint: Path, tmp_path: Path, target: str, group: str) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["medconv"]["config"][group] = {"_target_": target, "command": f"touch {tmp_path / 'hit'}"}
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match="is refused"):
        run.load(tmp_path / "bad.ckpt")
    assert not (tmp_path / "hit").exists()


def test_a_nested_target_is_refused_too(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["medconv"]["config"]["model"]["norm"] = {"_target_": "os.getcwd"}
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match=r"model\.norm\._target_=os\.getcwd is refused"):
        run.load(tmp_path / "bad.ckpt")


def test_a_package_that_the_user_names_is_trusted(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["medconv"]["config"]["model"]["_target_"] = "tiny.Net"
    torch.save(content, tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match="is refused"):
        run.load(tmp_path / "own.ckpt")
    assert type(run.load(tmp_path / "own.ckpt", trusted=["helpers"]).network).__name__ == "Net"


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"not a checkpoint at all", "no checkpoint|damaged"),
        (b"", "damaged|no checkpoint"),
        (b"\x80\x02.", "damaged"),
    ],
)
def test_damaged_checkpoints_are_refused(
    content: bytes,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=wanted):
        checkpoint_file.read(path)
    said = fails(
        "predict",
        ["--checkpoint", str(path), "--input", ".", "--output", "out"],
        tmp_path,
        monkeypatch,
        capsys,
    )
    assert "x.ckpt" in said


def test_a_payload_is_never_unpickled(tmp_path: Path) -> None:
    torch.save({"medconv": Payload(tmp_path / "hit"), "state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="refused"):
        checkpoint_file.read(tmp_path / "x.ckpt")
    (tmp_path / "y.ckpt").write_bytes(pickle.dumps(Payload(tmp_path / "hit")))
    with pytest.raises(ValueError, match="refused|damaged"):
        checkpoint_file.read(tmp_path / "y.ckpt")
    assert not (tmp_path / "hit").exists()


def test_a_flipped_bit_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    weights = next(iter(torch.load(checkpoint, weights_only=True)["state_dict"].values()))
    content[content.index(weights.numpy().tobytes())] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    torch.load(tmp_path / "x.ckpt", weights_only=True)  # does not look
    with pytest.raises(
        ValueError, match=r"x\.ckpt: damaged, the checksum of \S+/data/\d+ in it is another one"
    ):
        checkpoint_file.read(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [("model", "channels", [-1, 4]), ("model", "channels", [10**30, 4]), ("derived", "num_channels", 10**9)],
)
def test_a_record_that_was_made_up_is_named(
    checkpoint: Path, tmp_path: Path, group: str, key: str, value: object
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["medconv"]["config"][group][key] = value
    content["medconv"]["config"]["model"]["in_channels"] = value if key == "num_channels" else 1
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError):
        run.load(tmp_path / "x.ckpt")


def test_a_checkpoint_that_is_not_ours(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="not a medconv checkpoint"):
        checkpoint_file.read(tmp_path / "x.ckpt")


def test_predict_names_the_case_that_fails_and_does_the_rest(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tiny.write_dataset(tmp_path / "more", cases=3) / "imagesTr"
    (images / "case_1.nii.gz").write_bytes(b"damaged")
    arguments = ["--checkpoint", str(checkpoint), "--input", str(images), "--output", "out"]
    said = fails("predict", arguments, tmp_path, monkeypatch, capsys)
    assert "1 of 3 cases could not be predicted" in said
    assert "case case_1" in said
    assert sorted(p.name for p in (tmp_path / "out").glob("*.nii.gz")) == ["case_0.nii.gz", "case_2.nii.gz"]
