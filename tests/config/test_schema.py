"""medconv/config/schema.py: the config is frozen, has the folders of `conf/` as groups, and declares its keys."""

import re
from dataclasses import FrozenInstanceError, fields
from inspect import signature
from typing import Any

import pytest
import yaml
from lightning import Trainer
from omegaconf import OmegaConf

from medconv import config
from medconv.config import DataConfig, RunConfig, TrainerConfig, conf_dir
from medconv.config.keys import declared_keys
from medconv.config.schema import groups, list_options, set_elsewhere, trainer_schema
from medconv.data.preprocessing import normalisation, preprocess
from medconv.features.pretrained.fit import TO_3D
from medconv.performance.checkpointing import CHECKPOINTING
from medconv.planning.limits import SIZES

KEYS = {key.name: key for key in declared_keys(RunConfig)}
FILES = sorted(conf_dir().rglob("*.yaml"))


def test_a_config_cannot_be_changed():
    run_config = RunConfig(data=DataConfig(batch_size=2))
    with pytest.raises(FrozenInstanceError):
        run_config.seed = 1
    plain = run_config.plain()
    plain["data"]["batch_size"] = 4
    assert run_config.data.batch_size == 2


def test_every_folder_of_options_is_a_group():
    groups = {entry.name for entry in fields(RunConfig)}
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert folders - groups == {"debug", "experiment", "hparams_search", "hydra"}
    assert groups - folders == {"seed", "tags", "test", "task", "plan", "schedule", "run", "derived"}


def test_every_key_that_a_user_sets_has_a_text():
    without = [key.name for key in KEYS.values() if not key.text and not key.name.startswith("derived.")]
    assert not without
    assert not [key.name for key in KEYS.values() if len(key.text) > 180 or key.text.endswith(".")]


def test_defaults_are_values_that_their_keys_take():
    assert [problem for key in KEYS.values() if (problem := key.problem(key.default))] == []


def test_choices_are_those_that_the_code_knows():
    assert KEYS["plan.size"].limits.choices == tuple(SIZES)
    assert KEYS["perf.activation_checkpointing"].limits.choices == CHECKPOINTING
    assert KEYS["init.inflate_2d"].limits.choices == TO_3D


def declared_values(file):
    """Each declared key that a file of `conf/` sets, with its value and comment."""
    source = file.read_text()
    lines = source.splitlines()
    is_group = file.parent != conf_dir() and "# @package" not in source

    def walk(node, prefix):
        for name_node, value_node in node.value:
            name = f"{prefix}{name_node.value}"
            if name in KEYS and KEYS[name].kind != dict[str, Any]:
                start = name_node.start_mark.line
                while start and lines[start - 1].lstrip().startswith("#"):
                    start -= 1
                above = [line.strip("# ") for line in lines[start : name_node.start_mark.line]]
                behind = re.findall(r"\s#\s*(.*)", lines[name_node.start_mark.line])
                # a comment that opens the file is of the option
                comment = " ".join([*(above if start else []), *behind])
                yield KEYS[name], yaml.safe_load(yaml.serialize(value_node)), comment
            elif isinstance(value_node, yaml.MappingNode):
                yield from walk(value_node, f"{name}.")

    root = yaml.compose(source)
    if isinstance(root, yaml.MappingNode):
        yield from walk(root, f"{file.parent.name}." if is_group else "")


def contradictions(key, comment):
    """What a comment says of a key's values that its declaration does not.

    Read are examples after `such as`, lists such as `a, b or c` that name a choice, and bounds such as
    `1 or more`, `at least 1`, `more than 0` and `from 0 to 1`.
    """
    wrong = []
    for start in (match.end() for match in re.finditer(r"such as '?(?=[\[{])", comment)):
        ends = [n for n in range(start + 1, len(comment) + 1) if comment[n - 1] in "]}"]
        examples = [
            comment[start:end]
            for end in ends
            if comment[start:end].count("[") == comment[start:end].count("]")
        ]
        balanced = [text for text in examples if text.count("{") == text.count("}")]
        if problem := key.problem(yaml.safe_load(balanced[0])):
            wrong.append(problem)
    choices = {str(choice) for choice in key.limits.choices}
    for listed in re.findall(r"((?:[\w-]+(?: \([^)]*\))?, )+[\w-]+(?: \([^)]*\))?,? or [\w-]+)", comment):
        words = set(re.split(r",? or |, ", re.sub(r" \([^)]*\)", "", listed)))
        if words & choices and words - {"null"} != choices:
            wrong.append(f"{listed}, but the choices are {sorted(choices)}")
    bounds = {
        r"(\d+) or more": "ge",
        r"at least (\d+)": "ge",
        r"more than (\d+)": "gt",
        r"from (\d+) to \d+": "ge",
        r"from \d+ to (\d+)": "le",
        r"below (\d+)": "lt",
    }
    for pattern, bound in bounds.items():
        for number in re.findall(pattern, comment):
            if getattr(key.limits, bound) != float(number):
                wrong.append(f"{comment}, but {key.name} must be {key.expected()}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(conf_dir())))
def test_values_and_comments_of_options_do_not_contradict_the_declarations(file):
    for key, value, comment in declared_values(file):
        if not (isinstance(value, str) and "${" in value):
            assert key.problem(value) is None
        assert contradictions(key, comment) == []


def test_declared_keys_of_options_are_seen():
    seen = {key.name: comment for file in FILES for key, _, comment in declared_values(file)}
    assert {"run.nan_policy", "data.fold", "perf.compile", "trainer.max_time", "init.freeze"} <= seen.keys()
    assert seen["data.slice_axis"] == KEYS["data.slice_axis"].text


@pytest.mark.parametrize(
    ("name", "comment"),
    [
        ("data.batch_size", "0 or more"),
        ("task.overlap", "from 0 to 2"),
        ("perf.matmul_precision", "highest, high (TF32) or low"),
        ("data.slice_axis", "0, 1, 2 or 3"),
        ("data.source_spacing_mm", "such as [0,1.25], or {siteA_*: [...]}"),
        ("data.case_weights", "such as {siteA_*: two}: these cases"),
    ],
)
def test_a_comment_that_contradicts_is_seen(name, comment):
    assert contradictions(KEYS[name], comment)


def test_options_are_the_files_of_a_group():
    files = {file.stem for file in (config.conf_dir() / "model").glob("*.yaml")}
    assert list_options("model") == sorted(files - {"base"})
    assert "base" not in list_options("data")
    assert "model" in groups() and "hydra" not in groups()


def test_a_pattern_selects_names():
    names = list_options("model", "*resnet*")
    assert "segresnet" in names and "customconv" not in names
    assert list_options("model", "none of them") == []


def test_an_unknown_group_names_all_groups():
    with pytest.raises(config.ConfigError, match="there is no config group 'models'; .* model, "):
        list_options("models")


def test_choices_of_data_are_those_that_the_code_knows():
    assert KEYS["data.normalisation"].limits.choices == normalisation.NORMALISATIONS
    assert {*KEYS["data.convention"].limits.choices, None} == set(preprocess.CONVENTIONS)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("data.normalisation", ["ct", ["ct", "zscore"], None], ["minmax", ["ct", 3]]),
        ("data.source_spacing_mm", [[1, 1], {"a_*": [1, 1, 2.5]}, None], [2, [1, 0], {"a_*": 2}]),
        ("data.case_weights", [{"a_*": 2}, None], [{"a_*": 0}, 2, {"a_*": "twice"}]),
        ("data.ignore_label", [255, "unlabelled", [255, 254], None], [2.5, {"a": 1}]),
        ("data.images", ["a/{id}.nii", {"t1": "a/{id}"}, None], [3, ["a", "b"]]),
        ("data.annotated", [{"a_*": ["liver"]}], ["liver", {"a_*": "liver"}]),
        ("data.fold", [0, "all"], [None, 0.5, "2"]),
    ],
)
def test_keys_that_take_several_types(name, good, bad):
    assert [KEYS[name].problem(value) for value in good] == [None] * len(good)
    assert all(KEYS[name].problem(value) for value in bad)


LIGHTNING_KEYS = {key.name: key for key in declared_keys(TrainerConfig)}


class LaterTrainer(Trainer):
    """As if a later version of Lightning had further arguments."""

    def __init__(self, *, new_limit: int | None = 3, new_object: Trainer | None = None) -> None: ...


def test_arguments_of_a_later_trainer_become_keys_with_their_types():
    schema = OmegaConf.structured(trainer_schema(LaterTrainer))
    OmegaConf.set_readonly(schema, False)
    assert schema.new_limit == 3 and schema.new_object is None and schema.accelerator == "auto"
    with pytest.raises(Exception, match=r"'many' of type 'str' could not be converted to Integer"):
        schema.new_limit = "many"


def test_every_argument_of_the_trainer_is_a_key_or_says_where_it_is_set():
    option = OmegaConf.load(conf_dir() / "trainer/default.yaml")
    for key in signature(Trainer).parameters:
        assert (key in option) != (set_elsewhere(f"trainer.{key}") is not None), key


def test_a_precision_may_be_a_number_or_null():
    assert (
        LIGHTNING_KEYS["precision"].problem(32) is None and LIGHTNING_KEYS["precision"].problem(None) is None
    )


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("devices", [None, 2, "auto", [0, 1]], [0.5, {"a": 1}]),
        ("deterministic", [True, "warn", None], ["yes", 1]),
        ("limit_val_batches", [0, 0.5, 3, 3.0, None], [-1, 1.5, "half"]),
        ("val_check_interval", [0.5, 10, "00:01:00:00", None], [0, -1, 2.5]),
        ("overfit_batches", [0.0, 0.5, 1], [-1, 1.5, None]),
        ("num_sanity_val_steps", [-1, 0], [-2]),
        ("gradient_clip_algorithm", ["value", None], ["max"]),
        ("max_epochs", [None, -1, 3], [-2]),
    ],
)
def test_what_keys_take(name, good, bad):
    assert [LIGHTNING_KEYS[name].problem(value) for value in good] == [None] * len(good)
    assert all(LIGHTNING_KEYS[name].problem(value) for value in bad)
