"""medconv/training/distributed.py: ranks that would resume at different steps stop."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ranks
from torch import distributed

from medconv.training.distributed import ResumeStepCheck


def begin(step, ckpt_path=None):
    """The error of a rank that has loaded a checkpoint of this step, or begins at 0, or loads one later."""
    check, trainer = ResumeStepCheck(), SimpleNamespace(default_root_dir="runs/one", ckpt_path=ckpt_path)
    arguments = (trainer, None)
    if step:
        check.on_load_checkpoint(*arguments, {"global_step": step})
    try:
        check.on_fit_start(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def _begin(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    errors = [begin(7), begin((7, 0)[rank]), begin(0, ("last.ckpt", None)[rank])]
    Path(folder, f"{rank}.txt").write_text("\n".join(errors))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_all_ranks_stop_if_one_has_no_checkpoint(tmp_path):
    ranks.call(_begin, str(tmp_path))
    for rank in (0, 1):
        same, different, later = (tmp_path / f"{rank}.txt").read_text().split("\n")
        assert "they would resume at steps ['of a checkpoint', 0]" in later
        assert same == "" and different == (
            "runs/one: not the same folder for all processes, they would resume at steps [7, 0]; it must be on "
            "a file system that all machines share"
        )


def test_a_single_process_is_not_checked():
    assert begin(7) == ""
