"""medconv/training/checks.py: contradictions in a config are errors before any data is read."""

import pytest
from helpers.configs import composed

from medconv.config import ConfigError, validate
from medconv.config.schema import list_options
from medconv.training.checks import check_config

COUNTS_EPOCHS = "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR"  # has T_max


def test_a_learning_rate_that_cannot_learn_is_a_warning(caplog):
    check_config(validate(composed("optimizer.lr=1")))
    assert "optimizer.lr" not in caplog.text
    check_config(validate(composed("optimizer.lr=1000")))
    assert "optimizer.lr=1000: most networks learn nothing above 0.1" in caplog.text


def test_layers_that_keep_their_random_values_are_a_warning(caplog):
    for arguments, warns in ((["init.pretrained=x"], False), (["init.thaw_at=0.5"], False), ([], True)):
        caplog.clear()
        check_config(validate(composed("init.freeze=[encoder]", "trainer.max_steps=4", *arguments)))
        assert ("keep their random values" in caplog.text) == warns


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model._target_=monai.networks.nets.ViT"], r"^model\.img_size is missing: "),
        (["model=segresnet", "+model.init_filter=8"], r"did you mean model\.init_filters"),
        (["loss=dice_ce", "+loss.dice_weigth=2"], r"did you mean loss\.dice_weight"),
        (["+optimizer.momentum_=0.9"], r"did you mean optimizer\.momentum\?$"),
        (["scheduler._target_=torch.optim.lr_scheduler.StepLR"], r"^scheduler\.step_size is missing"),
        (
            [COUNTS_EPOCHS, "trainer.max_steps=4", "trainer.max_epochs=2"],
            r"^scheduler\.T_max is missing: .*trainer\.max_epochs tells where no max_time or max_steps",
        ),
        (["conv=none", "+conv.where=encoder"], r"^conv\.where=encoder: conv=none changes no layer"),
        (["sampler=foreground", "+sampler.share=1"], r"^there is no key sampler\.share"),
        (
            ["augmentation._target_=monai.transforms.Compose"],
            r"has no argument seed; .*augmentation=monai augmentation\.transforms=$",
        ),
        (["+augmentation.rotation=20"], r"did you mean augmentation\.rotation_deg"),
        (["+callbacks.pictures.case=3"], r"^there is no key callbacks\.pictures\.case: .*\.cases\?$"),
        (["data=phantom", "+data.layout.num_case=3"], r"did you mean data\.layout\.num_cases\?$"),
        (["early_stopping=patience", "+early_stopping.patients=3"], r"did you mean early_stopping\.patience"),
    ],
)
def test_a_wrong_argument_is_named(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        check_config(validate(composed(*arguments)))


@pytest.mark.parametrize("key", ["max_steps", "max_epochs", "limit_train_batches"])
def test_a_run_of_no_step_is_refused(key):
    with pytest.raises(ConfigError, match=rf"^trainer\.{key}=0: the run would train no step"):
        check_config(validate(composed(f"trainer.{key}=0")))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["augmentation=monai"],
        ["data=csv", "loss=bce", "data.root=x"],
        ["loss._target_=torch.nn.functional.binary_cross_entropy_with_logits", "+loss._partial_=true"],
        ["model=segresnet"],  # with divisible_by, which the plan reads
        ["logger=mlflow", "early_stopping=patience"],
        ["scheduler=plateau", "sampler=balanced", "optimizer=sgd"],
        ["trainer.profiler=Simple"],
        ["trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler}"],
        ["data=csv", "data.root=x", COUNTS_EPOCHS, "trainer.max_epochs=3"],
    ],
)
def test_options_are_right(arguments):
    check_config(validate(composed(*arguments)))


@pytest.mark.parametrize("name", list_options("data"))
def test_every_layout_takes_its_keys(name):
    root = [] if name == "joined" else ["data.root=x"]  # of each of its datasets
    check_config(validate(composed(f"data={name}", *root)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=joined", "data.root=x"], r"data\.root=x: .*layout\.joined, .* takes entries$"),
        (
            ["+data.modality=CT", "data=msd"],
            r"data\.modality=CT: .*msd, which reads this dataset, takes no such",
        ),
        (["+early_stopping.patience=5"], r"early_stopping\.patience=5: this option of early_stopping has no"),
        (["+sampler.foreground_share=0.9"], r"sampler\.foreground_share=0.9: this option of sampler has no"),
        (["init.inflate_2d=acs"], r"init\.inflate_2d=acs needs init\.pretrained"),
        (["optimizer.lr=-1"], r"optimizer\.lr must be 0 or more, got -1"),
        (["trainer.barebones=true"], r"trainer\.barebones=true leaves out checkpoints"),
        (["trainer.profiler=torch"], r"trainer\.profiler must be simple, .* with _target_, got torch$"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_config(validate(composed(*arguments)))
