"""medconv/training/plan_setup.py and utils/hardware.py: how much memory a step may take, from sizes that are known."""

import os

import pytest

from medconv.training.plan_setup import usable_gb
from medconv.utils.hardware import total_memory

GB = 2**30


@pytest.mark.parametrize(
    ("kind", "total", "processes", "expected"),
    [
        ("gpu", 80, 1, 24),  # the most medconv uses
        ("gpu", 23.6, 1, 16),  # 18.9, and the next step is 20
        ("gpu", 7.7, 1, 6),
        ("gpu", 7.9, 1, 6),  # cards that are sold as alike plan alike
        ("cpu", 64, 1, 1),  # a CPU is slow at large patches
        ("cpu", 64, 64, 0.5),
        ("cpu", 8, 4, 1),
        ("cpu", 0.5, 1, 0.5),  # the least, whatever there is
    ],
)
def test_the_budget_is_a_share_of_all_memory_rounded_down(kind, total, processes, expected):
    gb, words = usable_gb(kind, total * GB, processes)
    assert gb == expected and isinstance(gb, float)
    assert f"{total:g} GB" in words and kind.upper() in words
    assert ("the most medconv uses" in words) == (expected in (1, 24))
    assert (f"{processes} processes" in words) == (processes > 1)


def test_control_groups_limit_the_memory(tmp_path):
    """The process's own group and its parents count, in both versions of control groups."""
    job = tmp_path / "slurm/job_1"
    (job / "step").mkdir(parents=True)
    (tmp_path / "memory/batch").mkdir(parents=True)
    own = tmp_path / "own"
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (job / "step/memory.max").write_text("max\n")
    own.write_text("0::/slurm/job_1/step\n")
    assert total_memory(tmp_path, own) == physical
    (job / "memory.max").write_text(f"{3 * GB // 4}\n")
    assert total_memory(tmp_path, own) == 3 * GB // 4
    (tmp_path / "memory/batch/memory.limit_in_bytes").write_text(f"{GB // 2}\n")
    own.write_text("4:cpu,memory:/batch\n3:cpu:/\n0::/\n")
    assert total_memory(tmp_path, own) == GB // 2
    assert total_memory(tmp_path, tmp_path / "absent") == physical
