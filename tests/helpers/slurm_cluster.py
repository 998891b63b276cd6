"""A real Slurm of two nodes on this machine: its own daemons, without systemd and cgroups.

Debian has the programs: `apt-get install slurm-wlm munge`. They need root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun", "scancel", "sinfo")
# A job of the partition `high` preempts one of `low` on its node: SIGTERM, up to 60 s of grace, requeued. A job
# that is requeued waits until the credential of its step has expired, by default for 120 s (`cred_expire`).
_CONF = """\
ClusterName=medconv
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout=10
MaxArraySize=5
KillWait=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
JobRequeue=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=480
PartitionName=high Nodes=n1,n2 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why no cluster can be started here; empty: it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "the daemons of Slurm need root"


class Cluster:
    """Args: folder: of its state and logs; its path must be short, since it holds a socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """The output of one of Slurm's commands."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def begin(self) -> None:
        folder = self.folder
        for name in ("state", "spool-n1", "spool-n2", "munge"):
            (folder / name).mkdir()
        key = folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (folder / "munge").chmod(0o711)
        ports = _free_ports(3)
        (folder / "slurm.conf").write_text(
            _CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=ports)
        )
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{name}={folder / 'munge' / file}" for name, file in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        until(lambda: (folder / "munge/socket").exists())
        self._start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for node in ("n1", "n2"):
            self.start_node(node)
        until(lambda: self._idle_nodes() == 2)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, node: str) -> None:
        """As if the machine had failed: its daemon and all that it started are gone."""
        daemon = self._daemons.pop(node)
        for pid in _descendants(daemon.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
        daemon.kill()
        daemon.wait()

    def end(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("wb")
        self._daemons[name] = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
        )

    def _idle_nodes(self) -> int:
        command = ["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"]
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return sum(int(word) for word in done.stdout.split() if word.isdecimal())


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _descendants(pid: int) -> list[int]:
    """All processes below one, the nearest first."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in table.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents if its_parent == parent]
    return found[1:]


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
