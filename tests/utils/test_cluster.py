"""medconv/utils/cluster.py: what a launcher's variables mean, and which errors are of a lost process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.launchers import BATCH, STEP, TORCHRUN, launch
from omegaconf import OmegaConf

from medconv.config import ConfigError
from medconv.sweeps import launch as sweeps_launch
from medconv.training.distributed import strategy
from medconv.training.run_dir import RunDir
from medconv.utils import cluster, hardware


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if a launcher had started this process, with these variables."""
    return partial(launch, monkeypatch)


@pytest.mark.parametrize("variables", [TORCHRUN, STEP, {**BATCH, **TORCHRUN, "SLURM_STEP_NUM_TASKS": 2}])
def test_the_launcher_says_how_many_where_the_config_does_not(
    launched: Any, variables: dict[str, Any]
) -> None:
    launched(**variables)
    assert (
        cluster.processes(None, None)
        == cluster.processes(2, "4")
        == cluster.processes(None, "auto")
        == (2, 4)
    )
    assert cluster.processes(2, [0, 1, 2, 3]) == (2, [0, 1, 2, 3])
    name = cluster.launcher().name  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=f"trainer.num_nodes=3, but {name} started processes on 2 machines; do not set"
    ):
        cluster.processes(3, None)
    with pytest.raises(
        ValueError, match=f"trainer.devices=2, but {name} started 4 processes on each machine; do not set"
    ):
        cluster.processes(None, 2)


@pytest.mark.parametrize("variables", [{}, BATCH, {**STEP, "SLURM_STEP_NUM_TASKS": 1}])
def test_without_a_launcher_the_config_says(launched: Any, variables: dict[str, Any]) -> None:
    launched(**variables)
    assert cluster.processes(None, None) == (1, 1)
    assert cluster.processes(1, "auto") == (1, "auto")
    with pytest.raises(
        ValueError, match="num_nodes=2, but this process was started alone, on 1 machine; start .* torchrun"
    ):
        cluster.processes(2, None)
    launched(**variables, NODE_RANK=1)  # Lightning's own way
    assert cluster.processes(2, 4) == (2, 4)


def test_machines_with_different_numbers_of_processes_are_refused(launched: Any) -> None:
    launched(**{**STEP, "SLURM_STEP_NUM_TASKS": 7, "SLURM_STEP_TASKS_PER_NODE": "4,3"})
    with pytest.raises(
        ValueError, match="srun started 7 processes on 2 machines; it must be the same number on each"
    ):
        cluster.processes(None, None)
    launched(
        **{**STEP, "SLURM_STEP_NUM_TASKS": 6, "SLURM_STEP_NUM_NODES": 3, "SLURM_STEP_TASKS_PER_NODE": "2,1,3"}
    )
    with pytest.raises(
        ValueError, match="srun started 6 processes on 3 machines; it must be the same number on each"
    ):
        cluster.processes(None, None)
    launched(OMPI_COMM_WORLD_SIZE=2)
    with pytest.raises(
        ValueError, match="mpirun started 2 processes; start them by torchrun or srun instead"
    ):
        cluster.processes(None, None)
    launched(**TORCHRUN, OMPI_COMM_WORLD_SIZE=2)
    assert cluster.processes(None, None) == (2, 4)
    launched(**{**TORCHRUN, "WORLD_SIZE": 6})
    with pytest.raises(ValueError, match="torchrun started 6 processes on 2 machines"):
        cluster.processes(None, None)


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        (TORCHRUN, True),
        ({**TORCHRUN, "RANK": 4}, False),  # the first of the second machine
        ({**TORCHRUN, "SLURM_PROCID": 1, "GROUP_RANK": 1}, True),  # torchrun numbers machines as they come
        (STEP, True),
        ({**STEP, "SLURM_PROCID": 4}, False),
        (BATCH, True),
        ({"LOCAL_RANK": 1}, False),
        ({**BATCH, "LOCAL_RANK": 1}, False),
        ({"NODE_RANK": 1}, False),
    ],
)
def test_one_process_is_the_first_however_it_was_launched(
    launched: Any, variables: dict[str, Any], first: bool
) -> None:
    launched(**variables)
    assert cluster.is_first() == first


def test_a_sweep_starts_its_own_processes(
    launched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(**TORCHRUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=0,1"])
    with pytest.raises(ConfigError, match="its jobs start their own processes; run it without torchrun"):
        sweeps_launch.run_command(["-m", "seed=0,1"])


def test_a_launcher_binds_processes_to_cores() -> None:
    settings = {"accelerator": "cpu", "devices": 64}
    assert hardware.check_devices(settings, launched=True) == 64
    with pytest.raises(ValueError, match="cores, and no GPU"):
        hardware.check_devices(settings)


def test_a_timeout_is_positive_and_reaches_the_strategy() -> None:
    values = {
        "strategy": "ddp",
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": 1,
        "accumulate_grad_batches": 1,
    }
    perf = {"compile": False, "activation_checkpointing": "none", "timeout_seconds": 7.5}
    for name in ("ddp", "fsdp"):
        assert strategy.strategy({**values, "strategy": name}, perf)._timeout.total_seconds() == 7.5
    with pytest.raises(ValueError, match=r"perf\.timeout_seconds must be positive, got 0"):
        strategy.strategy(values, {**perf, "timeout_seconds": 0})


def test_only_lost_processes_are_called_so() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), cluster.detecting_lost_peers():
        raise RuntimeError("shapes differ")
    with (
        pytest.raises(cluster.PeerLostError, match=r"\(Timed out waiting 9ms for recv\)"),
        cluster.detecting_lost_peers(),
    ):
        raise RuntimeError(
            "[../third_party/gloo/unbound_buffer.cc:81] Timed out waiting 9ms for recv. Ask us.\nmore"
        )


@pytest.mark.parametrize(
    ("several", "said"),
    [
        (False, "Timed out waiting 9ms for recv"),
        (False, "DataLoader timed out after 5 seconds"),
        (True, "DataLoader timed out after 5 seconds"),
        (True, "NCCL error in: x.cpp, ncclInvalidUsage: Duplicate GPU detected"),
    ],
)
def test_a_process_without_others_loses_none_and_a_fault_of_its_own_stays_one(
    several: bool, said: str
) -> None:
    with pytest.raises(RuntimeError, match="^" + said[:9]), cluster.detecting_lost_peers(several):
        raise RuntimeError(said)


def test_the_reason_of_a_failed_process_is_shared(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun returns the highest exit code: after 75, a user's mistake would be queued again."""
    monkeypatch.setattr(cluster, "_LATE", 0.3)
    folder = tmp_path / "run"

    def ends(error: Exception, **more: Any) -> str:
        launched(**STEP, SLURM_STEP_ID=0, **more)
        with pytest.raises(type(error)), cluster.sharing_errors(folder):
            raise error
        with pytest.raises((ValueError, cluster.PeerLostError)) as found, cluster.sharing_errors(folder):
            raise cluster.PeerLostError("gone")
        return str(found.value)

    assert ends(cluster.PeerLostError("gone")) == "gone"
    assert (
        ends(ValueError("case a:\n no such file"))
        == "another process of this run failed: case a: no such file"
    )
    assert (
        ends(cluster.PeerLostError("gone"), SLURM_RESTART_COUNT=1) == "gone"
    )  # the reason of an earlier attempt does not count
    assert ends(KeyError(), SLURM_RESTART_COUNT=1) == "another process of this run failed: KeyError"
    (folder / cluster._ERROR_FILE).unlink()
    launched()
    with pytest.raises(ValueError), cluster.sharing_errors(folder):
        raise ValueError("alone")
    assert not (folder / cluster._ERROR_FILE).exists()


@pytest.mark.parametrize("given", ["never", "PATH"])
def test_a_job_that_is_started_again_goes_on(launched: Any, tmp_path: Path, given: str) -> None:
    """Whatever it began with; but not in what another job had left there."""
    folder = RunDir(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.last.touch()
    (tmp_path / "other.ckpt").touch()
    asked = "never" if given == "never" else str(tmp_path / "other.ckpt")
    composed = OmegaConf.create({"run": {"dir": str(folder.path), "name": "x", "resume": asked}})
    found = []
    for job, restarts in ((12, 0), (12, 1), (13, 1)):
        (folder.path / "summary.json").write_text('{"job": "SLURM_JOB_ID=12"}')
        launched(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=restarts)
        found.append(RunDir.of(composed, {}).resume)
    assert found == [asked, "auto", asked]
    launched(TORCHELASTIC_RUN_ID="x", TORCHELASTIC_RESTART_COUNT=2)
    (folder.path / "summary.json").write_text('{"job": "TORCHELASTIC_RUN_ID=x"}')
    assert RunDir.of(composed, {}).resume == "auto"
    folder.last.unlink()
    assert RunDir.of(composed, {}).resume == asked  # it was stopped before its first checkpoint
