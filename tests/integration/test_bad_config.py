"""Wrong values in a config: `train` exits with 1 and prints one message that names the key."""

import pytest
import torch
from helpers import tiny

from medconv import config
from medconv.cli.entrypoint import guard
from medconv.training import run
from medconv.training.run_dir import RunDir
from medconv.utils.exit_codes import DONE, USER


def train(composed):
    checked = config.validate(composed)
    run.train(checked, RunDir.of(checked, {}))
    return DONE


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.norm=layer", "norm must be one of ['batch', 'instance'], got 'layer'"),
        ("model.kernel_size=4", "kernel_size must be odd"),
        ("data.patch_size=[15,16,12]", "data.patch_size=[15, 16, 12]"),
        ("data.patch_size=[16,16]", "data.patch_size needs 3 positive numbers"),
        (
            "data.spacing_mm=[1,1,0]",
            "data.spacing_mm must be numbers, each more than 0 and finite, got [1.0, 1.0, 0.0]",
        ),
        (
            "data.normalisation=histogram",
            "data.normalisation must be zscore, zscore_nonzero, ct, dataset, rescale, none or null",
        ),
        ("plan.memory_gb=0", "plan.memory_gb must be more than 0 and finite, got 0.0"),
        (
            "plan.memory_gb=0.001",
            "plan.memory_gb: the smallest patch, 16 x 16 x 12 voxels, in a batch of 2 takes about 0.037 GB",
        ),
        (
            "plan.strides=[[2,2]]",
            "plan.strides needs 3 whole numbers of 1 or more for each step between stages, got [[2, 2]]",
        ),
        (
            "plan.strides=[2] data.patch_size=[15,16,12]",
            "data.patch_size must be divisible by (2, 2, 2) (plan.strides), got",
        ),
        (
            "plan.channels=[8,8,8,8]",
            "plan.channels needs one number of 1 or more for each of 3 stages, got [8, 8, 8, 8]",
        ),
        ("plan.max_stages=0", "plan.max_stages must be at least 1, got 0"),
        ("data.fold=7", "data.fold must be `all` or lie in 0..2, got 7"),
        ("data.fold=first", "data.fold"),
        (
            "scheduler=step scheduler.step_fraction=30",
            "scheduler: step_fraction must lie between 0 and 1, got 30 (given warmup_steps=30",
        ),
        ("data.num_folds=100", "data.num_folds"),
        ("data.batch_size=0", "data.batch_size must be at least 1, got 0"),
        ("data.persistent_workers=true", "data.persistent_workers=true needs workers"),
        ("data.spatial_dims=4", "data.spatial_dims must be 2, 3 or null, got 4"),
        (
            "data.spatial_dims=2 data.patch_size=[16,16,12]",
            "data.patch_size needs 2 positive numbers, one per spatial axis",
        ),
        (
            "data.flip_label_pairs=[[box,hol]]",
            "data.flip_label_pairs: there is no hol to swap; did you mean hole?",
        ),
        (
            "data.flip_label_pairs=[[box,hole]] conv=mirror",
            "cannot tell box from hole (data.flip_label_pairs)",
        ),
        (
            "data.regions={both:[1,9]}",
            "data.regions: both must name different label values from 1 to 2: 9 is not a foreground value",
        ),
        (
            "data.regions={both:[1,2],hole:2}",
            "data.regions_order is needed, as both and hole overlap: for each of ['both'",
        ),
        (
            "data.ignore_label=1",
            "data.ignore_label must be above all classes, from 2 (hole, which is then not a class) to 32767, got 1, class box",
        ),
        (
            "data.flip_label_pairs=[[box,hole]] data.regions={all:[1,2]}",
            "data.flip_label_pairs exchanges classes of label maps, but this run has regions targets",
        ),
        (
            "data.ignore_label=9 loss=tversky loss.batch=false",
            "use its argument batch=true, if it has one, or dice_ce",
        ),
        (
            "data.regions={a:1,b:2} loss=tversky loss.to_onehot_y=true",
            "loss: TverskyLoss cannot take regions targets",
        ),
        ("data.prepare_workers=0", "data.prepare_workers must be at least 1, got 0"),
        ("data.on_invalid_case=ignore", "data.on_invalid_case must be raise or skip, got ignore"),
        ("data.root=nowhere", "data.root=nowhere: no such folder"),
        ("data.root=null", "data.root is not set"),
        ("data.splits_file=nowhere.json", "nowhere.json"),
        ("trainer.precision=bf17", "trainer.precision must be auto, bf16-mixed, 16-mixed, 32-true, 64-true"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed"),
        ("trainer.accelerator=quantum", "quantum"),
        ("trainer.accelerator=cuda", "trainer.accelerator=cuda: no GPU is visible here"),
        ("trainer.strategy=dpp", "dpp"),
        (
            "perf.activation_checkpointing=all",
            "perf.activation_checkpointing must be none, blocks, pointwise or null, got all",
        ),
        ("perf.matmul_precision=low", "perf.matmul_precision must be highest, high or medium, got low"),
        ("perf.stop_sync_interval=0", "perf.stop_sync_interval must be at least 1, got 0"),
        ("perf.cuda_graphs=true", "perf.cuda_graphs=true needs perf.compile=true"),
        ("perf=autotune perf.auto_seconds=0", "perf.auto_seconds must be more than 0, got 0"),
        ("trainer.devices=4096", "trainer.devices=4096: on a CPU at most 8 processes for each of its"),
        (
            "trainer.num_nodes=2",
            "trainer.num_nodes=2, but this process was started alone, on 1 machine; start it on all of",
        ),
        ("perf.timeout_seconds=0", "perf.timeout_seconds must be more than 0 and finite, got 0"),
        ("trainer.devices=0", "trainer.devices=0: on a CPU it is a number of processes"),
        (
            "trainer.strategy=fsdp perf.activation_checkpointing=pointwise",
            "use perf.activation_checkpointing=blocks",
        ),
        ("optimizer.lr=-1", "optimizer.lr must be 0 or more, got -1"),
        ("optimizer.lr=fast", "optimizer.lr must be a number or null, got fast"),
        ("+optimizer.betas=[0.9]", "optimizer: betas must be two numbers, got [0.9] (given"),
        (
            "optimizer=adamw +optimizer.betas=[0.9]",
            "optimizer: list index out of range (given lr=0.002, weight_decay=0.01, betas",
        ),
        ("loss=dice_ce loss.ce_weight=a", "loss.ce_weight must be a number, got a"),
        (
            "loss._target_=torch.nn.CrossEntropyLoss",
            "loss: CrossEntropyLoss cannot take label_map targets: Expected target size",
        ),
        ("task.deep_supervision=maybe", "task.deep_supervision must be true or false, got maybe"),
        ("task.overlap=1.5", "task.overlap must be at least 0 and below 1, got 1.5"),
        ("augmentation.scale=2", "augmentation.scale must be a range [low, high] from 0.01 upwards, got [2]"),
        ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches must be at least 1, got 0"),
        ("seed=-1", "seed must be at least 0 and at most 4294967295, got -1"),
        ("task.mirror_axes=0", "task.mirror_axes must be a list of whole numbers or all, got 0"),
        ("task.sw_batch_size=1.5", "task.sw_batch_size must be a whole number, got 1.5"),
        (
            "data.flip_label_pairs=[1,2]",
            "data.flip_label_pairs needs pairs of two different names, such as [[left, right]], got [1, 2]",
        ),
        (
            "data.normalisation=3",
            "data.normalisation must be zscore, zscore_nonzero, ct, dataset, rescale, none or null, or a list of these, got 3",
        ),
        (
            "data.spacing_mm=[inf,1,1]",
            "data.spacing_mm must be numbers, each more than 0 and finite, got [inf, 1.0, 1.0]",
        ),
        ("augmentation.p.noise=2", "augmentation.p must be probabilities from 0 to 1 of rotation, scale"),
        ("+augmentation.p.twist=1", "got ['twist']"),
        (
            "augmentation=strong augmentation.p.elastic=1 augmentation.elastic_mm=30",
            "augmentation.elastic_mm must be at most 0.4 of",
        ),
        ("conv=transform conv.where=nothing_is_called_so", "conv: no convolution of UNet could be swapped"),
        ("conv=mirror conv.axes=[3]", "conv: axes must lie below 3, the image's spatial axes, got [3]"),
        ("conv.extent_mm=far", "conv.extent_mm must be a number or null, got far"),
        ("conv=mirror model.channels=[6,7]", "conv: layer"),
        ("conv=ball conv.radius_mm=0", "conv: layer encoder.0.0: radius_mm must be positive, got 0"),
        (
            "augmentation.mirror_axes=[3]",
            "augmentation.mirror_axes must be different spatial axes from 0 to 2, or `all`, got [3]",
        ),
        (
            "task.mirror_axes=[0]",
            "task.mirror_axes=[0] needs a network trained on mirrored images: add [0] to augmentation.mirror_axes",
        ),
        (
            "task.mirror_axes=[0,0] augmentation.mirror_axes=[0]",
            "task.mirror_axes must be different spatial axes from 0 to 2, or `all`, got [0, 0]",
        ),
        ("run.resume=sometimes", "run.resume must be auto, never or a checkpoint"),
        ("run.resume=/tmp", "got /tmp: a folder; its file is checkpoints/last.ckpt"),
        ("run.checkpoint_interval=soon", "run.checkpoint_interval must be written DD:HH:MM:SS"),
        ("init.pretrained=nowhere.ckpt", "nowhere.ckpt: no such checkpoint"),
    ],
)
def test_one_message_names_the_key(override, expected, dataset, tmp_path, monkeypatch, capsys):
    if torch.cuda.is_available() and "cuda" in override:
        pytest.skip("there is a CUDA device here")
    monkeypatch.chdir(tmp_path)
    composed = tiny.composed(*tiny.overrides(dataset, f"run.dir={tmp_path / 'run'}"), *override.split())
    assert guard(lambda: train(composed)) == USER
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert errors.count("error:") == 1, errors
    assert expected in errors


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.accelerator=gpu", "trainer.accelerator=gpu: no GPU is visible here; take auto or cpu"),
        ("trainer.devices=cuda", "trainer.devices=cuda: it is a number, a list or auto; trainer.accelerator"),
        ("trainer.precision=8", "trainer.precision must be auto, bf16-mixed"),
        ("conv=mirror +conv.share=0.5", "conv: Equivariant converts the whole network, share must be 1"),
        ("conv=none +conv.share=0.5", "conv.share=0.5: conv=none changes no layer and has no keys"),
        ("conv.share=half", "conv: share must be a number, more than 0 and at most 1, got half"),
        ("conv.where=3", "conv: where must be a regular expression, got 3"),
        (
            "trainer.max_time=20min",
            "trainer.max_time must be written DD:HH:MM:SS, such as 00:00:20:00 for 20 minutes, in quotes in YAML, got",
        ),
        (
            "perf.compile=true perf.cuda_graphs=true trainer.accumulate_grad_batches=2",
            "perf.cuda_graphs=true: gradients lie in the graph's memory, which its next run overwrites",
        ),
        ("trainer.max_time=00:00:00:00", "trainer.max_time must be more than 0, got 00:00:00:00"),
        ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch must be more than 0, got 0"),
        (
            "trainer.limit_train_batches=1.5",
            "trainer.limit_train_batches must be at least 0 and whole above 1",
        ),
        (
            "trainer.val_check_interval=0.0",
            "trainer.val_check_interval must be more than 0 and whole above 1",
        ),
    ],
)
def test_what_needs_no_data_fails_before_data_is_read(override, expected, tmp_path, capsys):
    if torch.cuda.is_available() and "gpu" in override:
        pytest.skip("there is a GPU here")
    composed = tiny.composed("data=msd", "data.root=nowhere", f"run.dir={tmp_path}/run", *override.split())
    assert guard(lambda: train(composed)) == USER
    errors = capsys.readouterr().err
    assert expected in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())
