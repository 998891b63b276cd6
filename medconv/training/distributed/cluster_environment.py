"""Lightning's cluster environment for jobs that Slurm starts."""

import os

from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment

from medconv.utils.cluster import launcher, srun_tasks


def environment() -> ClusterEnvironment | None:
    """For Lightning's `plugins`; None: Lightning detects it correctly.

    In a batch script of several tasks, without srun, Lightning would wait for the other tasks.
    """
    started_by = launcher()
    if started_by is not None and started_by.name == "srun":
        return SrunStep()
    return LightningEnvironment() if started_by is None and "SLURM_NTASKS" in os.environ else None


class SrunStep(SLURMEnvironment):
    """Reads srun's variables of this job step, not those of the whole job; does not handle signals."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(
            os.environ["SLURM_STEP_NODELIST"]
        )

    def world_size(self) -> int:
        return srun_tasks()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """`cluster.processes` has checked them."""

    @staticmethod
    def _validate_srun_used() -> None: ...

    @staticmethod
    def _validate_srun_variables() -> None: ...
