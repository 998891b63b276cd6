"""medconv/training/run.py: arguments of classes, checked before any data is read."""

import pytest
from helpers.configs import composed

from medconv.config import ConfigError, validate
from medconv.config.schema import list_options
from medconv.training.run import checked_config

COUNTS_EPOCHS = "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR"  # has T_max


def test_a_learning_rate_that_cannot_learn_is_a_warning(caplog):
    checked_config(validate(composed("optimizer.lr=1")))
    assert "optimizer.lr" not in caplog.text
    checked_config(validate(composed("optimizer.lr=1000")))
    assert "optimizer.lr=1000: most networks learn nothing above 0.1" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model._target_=monai.networks.nets.ViT"], r"^model\.img_size is missing: "),
        (["model=segresnet", "+model.init_filter=8"], r"did you mean model\.init_filters"),
        (["loss=dice_ce", "+loss.dice_weigth=2"], r"did you mean loss\.dice_weight"),
        (["+optimizer.momentum_=0.9"], r"did you mean optimizer\.momentum\?$"),
        (["scheduler._target_=torch.optim.lr_scheduler.StepLR"], r"^scheduler\.step_size is missing"),
        ([COUNTS_EPOCHS, "trainer.max_steps=4"], r"^scheduler\.T_max is missing: .*trainer\.max_epochs"),
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
        checked_config(validate(composed(*arguments)))


@pytest.mark.parametrize("key", ["max_steps", "max_epochs", "limit_train_batches"])
def test_a_run_of_no_step_is_refused(key):
    with pytest.raises(ConfigError, match=rf"^trainer\.{key}=0: the run would train no step"):
        checked_config(validate(composed(f"trainer.{key}=0")))


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
        ["data=csv", "data.root=x", COUNTS_EPOCHS, "trainer.max_epochs=3"],
    ],
)
def test_options_are_right(arguments):
    checked_config(validate(composed(*arguments)))


@pytest.mark.parametrize("name", list_options("data"))
def test_every_layout_takes_its_keys(name):
    checked_config(validate(composed(f"data={name}", "data.root=x")))
