"""medconv/utils/cluster.py: the variables of a launcher, and which errors mean a lost process."""

import pytest
from helpers.launchers import BATCH, JOB, STEP, TORCHRUN

from medconv.utils import cluster


@pytest.mark.parametrize("variables", [TORCHRUN, STEP, {**BATCH, **TORCHRUN, "SLURM_STEP_NUM_TASKS": 2}])
def test_the_launcher_sets_the_number_of_processes_and_the_config_must_agree(launched, variables):
    launched(**variables)
    assert (
        cluster.processes(None, None)
        == cluster.processes(2, "4")
        == cluster.processes(None, "auto")
        == (2, 4)
    )
    assert cluster.processes(2, [0, 1, 2, 3]) == (2, [0, 1, 2, 3])
    name = cluster.launcher().name
    with pytest.raises(
        ValueError, match=f"num_nodes=3, but {name} started processes on 2 machines; do not set"
    ):
        cluster.processes(3, None)
    with pytest.raises(
        ValueError, match=f"devices=2, but {name} started 4 processes on each machine; do not set"
    ):
        cluster.processes(None, 2)


def test_a_job_that_sets_ranks_alone_starts_a_process_on_each_machine(launched):
    launched(**JOB)
    assert cluster.processes(None, None) == cluster.processes(8, 1) == (8, 1)
    with pytest.raises(ValueError, match=r"devices=4, but the job \(RANK, WORLD_SIZE\) started 1 processes"):
        cluster.processes(None, 4)
    launched(**JOB, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4)
    assert cluster.processes(None, None) == (2, 4)
    launched(**{**JOB, "WORLD_SIZE": 6}, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4)
    with pytest.raises(ValueError, match="started 6 processes on 1 machines"):
        cluster.processes(None, None)
    launched(RANK=1, WORLD_SIZE=2)
    with pytest.raises(
        ValueError, match="RANK=1 and WORLD_SIZE=2 are set, so .* need MASTER_ADDR and MASTER_PORT"
    ):
        cluster.processes(None, None)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got two$"),
        ({"RANK": 8}, "^RANK=8 must be below WORLD_SIZE=8"),
        # Kubernetes: of a service that is named `master`
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "got tcp://10.0.0.1:80; .* a service named `master`"),
        # Kubeflow sets WORLD_SIZE to the processes that its torchrun would start
        ({"PET_NPROC_PER_NODE": 4}, "^PET_NPROC_PER_NODE=4 asks for several .* start them by `torchrun"),
    ],
)
def test_a_job_whose_processes_would_wait_for_ever_is_refused(launched, variables, message):
    launched(**{**JOB, **variables})
    with pytest.raises(ValueError, match=message):
        cluster.launcher()


@pytest.mark.parametrize("variables", [{"PET_NPROC_PER_NODE": "auto"}, {"PET_NPROC_PER_NODE": 1}])
def test_a_pytorchjob_of_one_process_on_each_machine_trains(launched, variables):
    launched(**JOB, **variables)
    assert cluster.processes(None, None) == (8, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {**JOB, "WORLD_SIZE": 1},  # of one replica
        {**JOB, "WORLD_SIZE": 2, "LOCAL_RANK": 1},  # started by Lightning within such a replica
    ],
)
def test_a_job_of_one_process_is_no_launcher(launched, variables):
    launched(**variables)
    assert cluster.launcher() is None


@pytest.mark.parametrize("variables", [{}, BATCH, {**STEP, "SLURM_STEP_NUM_TASKS": 1}])
def test_without_a_launcher_the_config_sets_the_number_of_processes(launched, variables):
    launched(**variables)
    assert cluster.processes(None, None) == (1, 1)
    assert cluster.processes(1, "auto") == (1, "auto")
    with pytest.raises(
        ValueError, match="num_nodes=2, but this process was started alone, on 1 machine; start .* torchrun"
    ):
        cluster.processes(2, None)
    launched(**variables, NODE_RANK=1)  # started by hand, as Lightning documents it
    assert cluster.processes(2, 4) == (2, 4)


def test_machines_with_different_numbers_of_processes_are_refused(launched):
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
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        launched(**{name: 2})
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
        (
            {**TORCHRUN, "SLURM_PROCID": 1, "GROUP_RANK": 1},
            True,
        ),  # torchrun numbers machines in order of arrival
        (STEP, True),
        ({**STEP, "SLURM_PROCID": 4}, False),
        (BATCH, True),
        (JOB, True),
        ({**JOB, "RANK": 1}, False),
        ({"LOCAL_RANK": 1}, False),
        ({**BATCH, "LOCAL_RANK": 1}, False),
        ({"NODE_RANK": 1}, False),
    ],
)
def test_each_launcher_has_one_first_process(launched, variables, first):
    launched(**variables)
    assert cluster.is_first() == first


def test_only_errors_about_a_peer_become_peer_lost_errors():
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
    "message",
    [
        "DataLoader timed out after 5 seconds",
        "NCCL error in: x.cpp, ncclInvalidUsage: Duplicate GPU detected",
    ],
)
def test_a_fault_of_a_process_itself_is_no_lost_peer(message):
    with pytest.raises(RuntimeError, match="^" + message[:9]), cluster.detecting_lost_peers():
        raise RuntimeError(message)


def test_the_error_of_a_failed_process_reaches_the_others(launched, tmp_path, monkeypatch):
    """srun returns the highest exit code: after 75, a user's mistake would be queued again."""
    monkeypatch.setattr(cluster, "_VISIBLE_SECONDS", 0.3)
    folder = tmp_path / "run"

    def shared_error(error, **more):
        launched(**STEP, SLURM_STEP_ID=0, **more)
        with pytest.raises(type(error)), cluster.sharing_errors(folder):
            raise error
        with pytest.raises((ValueError, cluster.PeerLostError)) as error, cluster.sharing_errors(folder):
            raise cluster.PeerLostError("gone")
        return str(error.value)

    assert shared_error(cluster.PeerLostError("gone")) == "gone"
    assert (
        shared_error(ValueError("case a:\n no such file"))
        == "another process of this run failed: case a: no such file"
    )
    assert (
        shared_error(cluster.PeerLostError("gone"), SLURM_RESTART_COUNT=1) == "gone"
    )  # the reason of an earlier attempt does not count
    assert shared_error(KeyError(), SLURM_RESTART_COUNT=1) == "another process of this run failed: KeyError"
    (folder / cluster._ERROR_FILE).unlink()
    elsewhere = folder / "of the job" / "error"
    assert shared_error(ValueError("none"), MEDCONV_ERROR_FILE=elsewhere).endswith("failed: none")
    assert elsewhere.read_text().endswith("\nnone\n") and not (folder / cluster._ERROR_FILE).exists()
    launched()
    with pytest.raises(ValueError), cluster.sharing_errors(folder):
        raise ValueError("alone")
    assert not (folder / cluster._ERROR_FILE).exists()
