"""medconv/training/plan_for_time.py: the largest size of which enough steps fit, measured on this machine."""

import json
import math
from pathlib import Path

import pytest
from helpers import tiny
from omegaconf import OmegaConf

from medconv.planning.sizes import SIZES
from medconv.training.plan_for_time import largest

SECONDS = {"tiny": 0.1, "small": 0.4, "medium": 1.0, "large": 4.0}


@pytest.mark.parametrize("name", SIZES)
def test_the_largest_size_with_enough_steps_is_taken(name: str) -> None:
    needed = SIZES[name].enough_steps * SECONDS[name]
    assert largest(SECONDS.__getitem__, 1.01 * needed + 1)[0] == name


def test_a_size_is_not_measured_where_the_smaller_one_has_too_few_steps() -> None:
    asked = []
    name, why = largest(lambda name: asked.append(name) or SECONDS[name], 60.0)
    assert (name, asked) == ("tiny", ["tiny", "small"])
    minutes = SIZES["small"].enough_steps * SECONDS["small"] / 0.85 / 60
    assert why == (
        f"some 600 steps fit into trainer.max_time; small, 0.4 s a step, from {minutes:.2g} minutes on"
    )


def test_a_size_that_does_not_fit_into_memory_is_not_taken() -> None:
    name, why = largest({**SECONDS, "medium": math.inf}.__getitem__, 1e6)
    assert name == "small" and why.endswith("; medium does not fit into memory")


def test_a_run_with_a_time_limit_takes_a_size_and_records_it(tmp_path: Path) -> None:
    dataset = tiny.write_dataset(tmp_path / "data/tiny")
    open_keys = ("data.patch_size=null", "data.batch_size=null", "model.channels=${derived.channels}")
    arguments = (*open_keys, "model.strides=${derived.strides}", "trainer.max_time=00:00:00:05")
    assert tiny.train(dataset, tmp_path / "run", *arguments)["status"] == "done"
    derived = OmegaConf.load(tmp_path / "run/config.yaml").derived
    files = list((tmp_path / "data/prepared/step_seconds").glob("*.json"))
    seconds = {
        SIZES[derived.size].base_channels: None,
        **{
            content["key"]["plan"]["channels"][0]: content["seconds"]
            for content in (json.loads(path.read_text()) for path in files)
        },
    }
    assert derived.channels[0] == SIZES[derived.size].base_channels
    assert seconds[derived.channels[0]] > 0 and seconds[SIZES["tiny"].base_channels] > 0
