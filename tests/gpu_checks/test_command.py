"""scripts/gpu_checks/command.py: which parts run, what stays of earlier results, and time that is over."""

import json

import pytest
from helpers import gpu_parts, ranks, tiny

from gpu_checks import claims, command


def test_results_of_other_parts_stay_and_missing_leaves_answers_out(monkeypatch, tmp_path, capsys):
    file = tmp_path / "results.json"
    for name in ("augmentation", "full-gpu"):
        assert gpu_parts.run(monkeypatch, "--part", name, "--json", str(file)) == 0
    content = json.loads(file.read_text())
    assert set(content["parts"]) == {"augmentation", "full-gpu"}
    assert content["machine"]["device"] == "cpu" and content["machine"]["versions"]["torch"]
    assert content["parts"]["full-gpu"]["command"].endswith("--device cpu --part full-gpu --tiny")
    capsys.readouterr()
    names = ["augmentation", "full-gpu", "muon"]
    assert gpu_parts.run(monkeypatch, "--part", *names, "--json", str(file), "--missing") == 0
    printed = capsys.readouterr().out
    assert "1 parts in" in printed and "muon " in printed and "augmentation" not in printed


def test_a_group_that_cannot_be_imported_costs_no_other(monkeypatch, capsys):
    real = claims.of_group

    def of_group(group):
        if group == "speed":
            raise ImportError("no module named monai")
        return real(group)

    monkeypatch.setattr(command, "of_group", of_group)
    assert gpu_parts.run(monkeypatch, "--part", "speed", "muon") == 1
    printed = capsys.readouterr().out
    assert "no module named monai" in printed and "change of a skipped step" in printed


def test_an_unknown_part_or_a_file_of_another_kind_is_refused(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="no part lunch; --list prints them"):
        gpu_parts.run(monkeypatch, "--part", "lunch")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(SystemExit, match="not a file of this command"):
        gpu_parts.run(monkeypatch, "--part", "muon", "--json", str(tmp_path / "other.json"))


def test_names_are_unique_and_every_part_fits_into_a_chunk():
    every = [claim for group in claims.GROUPS for claim in claims.of_group(group)]
    assert len({claim.name for claim in every} | set(claims.GROUPS)) == len(every) + len(claims.GROUPS)
    assert all(claim.limit_s <= claims.CHUNK_S for claim in every)


def test_the_script_starts_without_an_installed_medconv(tmp_path):
    done = ranks.python(tiny.ROOT / "scripts/gpu_check.py", "--list", cwd=tmp_path, PYTHONPATH="")
    assert done.stdout.splitlines()[0].split()[:2] == ["smoke", "train-bf16"]
