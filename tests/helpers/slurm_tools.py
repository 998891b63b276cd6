"""Small stand-ins for sbatch, squeue, scontrol and srun, which run the real script of a sweep."""

import os
from pathlib import Path

# Runs the tasks of the array at once, each as Slurm would start it, then those that were requeued, and
# remembers the process that waits for them. The last task has the number of the array, as in Slurm.
SBATCH = """#!/usr/bin/env bash
script=${!#}
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
output=$(sed -n 's/^#SBATCH --output=//p' "$script" | sed 's/%A/7/')
seq 0 "$last" | tee "$QUEUE.all" > "$QUEUE.tasks"
(
    for ((restarts = 0; restarts < 3; restarts++)); do
        tasks=$(sort -nu "$QUEUE.tasks")
        : > "$QUEUE.tasks"
        for i in $tasks; do
            SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$i SLURM_JOB_ID=$((i == last ? 7 : 8 + i)) \\
                SLURM_RESTART_COUNT=$restarts bash "$script" >> "${output/\\%a/$i}" 2>&1 &
        done
        wait
    done
) > /dev/null 2>&1 &
echo $! > "$QUEUE"
sed 's/--job-name=//' <<< "$2" > "$QUEUE.name"
echo "7;cluster"
"""
SQUEUE = """#!/usr/bin/env bash
# a process that has ended counts as ended before its parent has asked for its exit code
runs() { grep -qs '^State:.[^Z]' "/proc/$(cat "$QUEUE")/status"; }
[ "$2" = --name ] && [ "$3" = "$(cat "$QUEUE.name")" ] && { runs && echo 7; exit 0; }
# of a task, as its own script sees it
case "$3" in 7_*)
    grep -qsx "${3#7_}" "$QUEUE.tasks" && echo COMPLETING || echo "${STATE-RUNNING}"
    exit ;;
esac
[ "$3" = 7 ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
runs && echo "7_0 RUNNING" || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
"""
# `requeue 7` requeues all tasks of the array.
SCONTROL = """#!/usr/bin/env bash
[ -n "$REFUSED" ] && exit 1
case "$2" in
    7) cat "$QUEUE.all" ;;
    7_*) echo "${2#7_}" ;;
    *) echo $(($2 - 8)) ;;
esac >> "$QUEUE.tasks"
"""
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec ${INSTEAD:-"$@"}
"""


def killed_by(name: str) -> str:
    """A line of a shell script that ends it by a signal, even where that is ignored, as SIGHUP is below nohup."""
    return f"exec env --default-signal={name} sh -c 'kill -{name} $$'"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a machine with Slurm, whose tools are in `folder`."""
    tools = folder / "bin"
    tools.mkdir()
    for name, content in {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL, "srun": SRUN}.items():
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "QUEUE": str(folder / "queue")}
