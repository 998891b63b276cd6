"""Lightning's cluster environment for jobs that Slurm starts."""

from __future__ import annotations

import os

from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment

from medconv.utils.cluster import _tasks, launcher


def environment() -> ClusterEnvironment | None:
    """For Lightning's `plugins`; None: it finds out by itself, and right.

    It would take a batch script of several tasks, without srun, for one of those tasks, and wait for the
    others.
    """
    found = launcher()
    if found is not None and found.name == "srun":
        return Step()
    return LightningEnvironment() if found is None and "SLURM_NTASKS" in os.environ else None


class Step(SLURMEnvironment):
    """Lightning's, from what srun says of this step, whatever the whole job has; signals are not its
    business.
    """

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(
            os.environ["SLURM_STEP_NODELIST"]
        )

    def world_size(self) -> int:
        return _tasks()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """`processes` has compared them."""

    @staticmethod
    def _validate_srun_used() -> None: ...

    @staticmethod
    def _validate_srun_variables() -> None: ...
