"""medconv/features/autotune/plan_size.py: the largest size of which enough steps fit, measured on this machine."""

import json
import math
from types import SimpleNamespace

import pytest
from helpers import tiny
from helpers.plans import reason, single_case
from monai.networks.nets import DynUNet, SegResNet
from omegaconf import OmegaConf

from medconv import config as configs
from medconv.config import ConfigError
from medconv.data.datasets.dataset_json import auto
from medconv.features.autotune import plan_size
from medconv.features.autotune.plan_size import Timing, largest
from medconv.models.unet import Stages, UNet
from medconv.planning.limits import SIZES, PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.topology import Budget
from medconv.training.plan_setup import make_plan

SECONDS = {"tiny": 0.1, "small": 0.4, "medium": 1.0, "large": 4.0, "full": 4.0}


@pytest.mark.parametrize("name", SIZES)
def test_the_largest_size_with_enough_steps_is_taken(name):
    needed = SIZES[name].enough_steps * SECONDS[name]
    assert largest(SECONDS, SECONDS.__getitem__, 1.01 * needed + 1, {})[0] == name


def test_a_size_is_not_measured_where_the_smaller_one_has_too_few_steps():
    asked = []
    name, larger = largest(SECONDS, lambda name: asked.append(name) or SECONDS[name], 60.0, {})
    assert (name, asked) == ("tiny", ["tiny", "small"])
    assert larger == "; size small (0.4 s a step) needs at least 1.6 minutes"  # 80 s of 85 % of them


def test_the_finer_grid_that_more_time_buys_is_named():
    grids = {"tiny": "2 x 2 x 2 mm", "small": "1.6 x 1.6 x 1.6 mm"}
    _, why = largest(SECONDS, SECONDS.__getitem__, 60.0, grids)
    assert why.endswith("; size small at 1.6 x 1.6 x 1.6 mm (0.4 s a step) needs at least 1.6 minutes")
    _, why = largest(SECONDS, SECONDS.__getitem__, 60.0, {**grids, "small": grids["tiny"]})
    assert why.endswith("; size small (0.4 s a step) needs at least 1.6 minutes")


@pytest.mark.parametrize("step", [0.31, 0.77, 3.3, 12.0])
def test_the_time_for_a_larger_size_suffices_for_it(step):
    seconds = {**SECONDS, "medium": step}
    minutes = float(largest(SECONDS, seconds.__getitem__, 100.0, {})[1].split()[-2])
    assert (
        largest(SECONDS, {**seconds, "large": math.inf}.__getitem__, 0.85 * 60 * minutes, {})[0] == "medium"
    )


def test_a_size_that_does_not_fit_into_memory_is_not_taken():
    name, why = largest(SECONDS, {**SECONDS, "medium": math.inf}.__getitem__, 1e6, {})
    assert name == "small" and why.endswith("; size medium does not fit into memory")


@pytest.mark.parametrize("gpu", [False, True])
def test_only_a_gpu_gets_the_grid_of_the_images(gpu, monkeypatch):
    monkeypatch.setattr(plan_size, "uses_gpu", lambda accelerator: gpu)
    sizes = plan_size._sizes_for("auto")
    assert sizes == [*SECONDS][: 5 if gpu else 4]


def measured(cache):
    """Channels of the first stage to seconds."""
    contents = (json.loads(path.read_text()) for path in (cache / "step_seconds").glob("*.json"))
    return {content["key"]["model"]["channels"][0]: content["seconds"] for content in contents}


def tiny_config(dataset, cache, *overrides):
    keys = ["data=msd", f"data.root={dataset}", f"data.cache_dir={cache}", "trainer.accelerator=cpu"]
    return configs.validate(tiny.composed(*keys, *overrides))


def plan_of(dataset, cache, *overrides):
    """The plan of a small image for 20 seconds."""
    config = tiny_config(dataset, cache, "trainer.max_time=00:00:00:20", *overrides)
    return make_plan(config, auto(dataset), single_case((16, 16, 16), (1.0, 1.0, 1.0)))


@pytest.fixture
def any_load(monkeypatch):
    """Measurements are kept, whatever else this machine does."""
    monkeypatch.setattr(plan_size, "_BUSY", math.inf)


@pytest.mark.usefixtures("any_load")
def test_steps_of_several_batches_take_as_many_times_as_long(dataset, tmp_path):
    planned = plan_of(dataset, tmp_path, "trainer.accumulate_grad_batches=50", "schedule.patch=whole")
    of_a_batch = measured(tmp_path)[planned.channels[0]]
    steps = int(reason(planned, "size").split()[1])
    assert steps == pytest.approx(0.85 * 20 / (50 * of_a_batch), abs=1)


@pytest.mark.usefixtures("any_load")
def test_more_steps_fit_as_patches_grow(dataset, tmp_path):
    grows = plan_of(dataset, tmp_path)
    whole = plan_of(dataset, tmp_path, "schedule.patch=whole")
    num_steps = [int(reason(planned, "size").split()[1]) for planned in (grows, whole)]
    assert " steps, as patches grow, fit into trainer.max_time" in reason(grows, "size")
    assert num_steps[0] >= num_steps[1]


def test_residual_blocks_are_timed(dataset, tmp_path, monkeypatch):
    seen = []
    block = Stages.residual

    def residual(self, in_channels, stage, blocks, *stride):
        seen.append([stage, blocks])
        return block(self, in_channels, stage, blocks, *stride)

    monkeypatch.setattr(Stages, "residual", residual)
    monkeypatch.setattr(plan_size, "_timed", lambda trial: Timing(1.0, 1.0))
    plan_of(dataset, tmp_path)
    assert not seen
    plan_of(dataset, tmp_path, "model=resenc", "model.residual_blocks=[1,2,3,3,3]")
    assert seen[:3] == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("model", "network"), [("segresnet", SegResNet), ("dynunet", DynUNet), ("customconv", UNet)]
)
def test_the_network_of_the_config_is_timed(model, network, dataset, tmp_path, monkeypatch):
    seen = []

    def timed(trial):
        trial.step()
        seen.append(trial.network)
        return Timing(1.0, 1.0)

    monkeypatch.setattr(plan_size, "_timed", timed)
    plan_of(dataset, tmp_path, f"model={model}")
    assert {type(one) for one in seen} == {network}


@pytest.mark.parametrize(("core_seconds", "is_busy"), [(0.9, False), (0.1, True)])
def test_a_step_of_a_busy_machine_counts_once(core_seconds, is_busy, dataset, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plan_size, "_timed", lambda trial: Timing(1.0, core_seconds))
    planned = plan_of(dataset, tmp_path, "schedule.patch=whole")
    assert reason(planned, "size").startswith("about 17 steps")
    assert bool(measured(tmp_path)) is not is_busy
    assert ("this machine is busy: a step of size tiny took 1 s, 0.1 s of them" in caplog.text) is is_busy


def test_time_on_a_core_is_that_of_the_step(monkeypatch):
    """Of three steps of 0.2 s, of which other processes take half, the fastest."""
    seconds = iter([0.0, 0.3, 1.0, 1.2, 2.0, 2.3])
    core_seconds = iter([0.0, 0.1, 0.1, 0.2, 0.2, 0.3])
    clock = SimpleNamespace(perf_counter=seconds.__next__, thread_time=core_seconds.__next__)
    monkeypatch.setattr(plan_size, "time", clock)
    trial = SimpleNamespace(step=lambda: 0.0)
    timing = plan_size._timed(trial)
    assert timing == pytest.approx((0.2, 0.1))
    assert timing.is_busy


def test_a_size_whose_network_cannot_be_built_is_passed_over(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_size, "_timed", lambda trial: Timing(0.01, 0.01))

    def planned(*overrides):
        keys = ("trainer.max_time=00:08:00:00", "trainer.precision=32-true", "plan.memory_gb=2")
        config = tiny_config(dataset, tmp_path, *keys, *overrides)
        return make_plan(config, auto(dataset), single_case((96, 96, 96), (1.0, 1.0, 1.0)))

    smallest = planned("plan.size=tiny")
    channels = [4] * (len(planned("plan.size=large").channels))
    assert len(smallest.channels) < len(channels), "else all sizes take it"
    fitted = planned(f"model.channels={channels}")
    assert fitted.size != "tiny" and len(fitted.channels) == len(channels)
    with pytest.raises(ConfigError, match=r"model: .* \(plan\.size=tiny, and so for the others\)$"):
        planned("model.channels=[4,8]")


def test_a_size_whose_smallest_patch_does_not_fit_is_not_taken(dataset, tmp_path):
    settings = {"strides": [2, 2, 2], "batch_size": 1}
    with pytest.raises(ValueError, match=r"memory_gb: the smallest patch"):
        plan(single_case((16, 16, 16), (1.0, 1.0, 1.0)), PlanOverrides(**settings), Budget(0.01))
    keys = ("plan.strides=[2,2,2]", "data.batch_size=1", "plan.memory_gb=0.01")
    assert plan_of(dataset, tmp_path, *keys).size == "tiny"


@pytest.mark.usefixtures("any_load")
def test_a_run_with_a_time_limit_takes_a_size_and_records_it(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data/tiny")
    open_keys = ("data.patch_size=null", "data.batch_size=null", "model.channels=${derived.channels}")
    arguments = (*open_keys, "model.strides=${derived.strides}", "trainer.max_time=00:00:00:05")
    assert tiny.train(dataset, tmp_path / "run", *arguments)["status"] == "done"
    derived = OmegaConf.load(tmp_path / "run/config.yaml").derived
    seconds = measured(tmp_path / "data/prepared")
    assert derived.channels[0] == SIZES[derived.size].base_channels
    assert seconds[derived.channels[0]] > 0 and seconds[SIZES["tiny"].base_channels] > 0
