"""scripts/benchmarks/zoo.py: real trainings of defaults, of plans by hand and of another checkout; its table."""

import pytest
from helpers import tiny
from helpers.benchmarks_harness import benchmark, processes_are_forked

from benchmarks import zoo

QUICK = [
    *("plan.channels=[4,8]", "data.patch_size=[16,16]", "data.batch_size=2", "data.num_workers=0"),
    *("trainer.accelerator=cpu", "data.samples_per_epoch=4", "data.layout.num_cases=6"),
]


@pytest.mark.slow
def test_both_checkouts_and_members_train_in_the_same_minutes(monkeypatch, tmp_path):
    processes_are_forked(monkeypatch)
    arguments = [
        "zoo",
        "--sets",
        "phantom2d",
        "--against",
        str(tiny.ROOT),
        "--minutes",
        "0.01",
        "--output",
        str(tmp_path / "runs"),
    ]
    arguments += ["--members", "2", "--set", *QUICK, "--other-set", *QUICK, "--plot", str(tmp_path / "plots")]
    rows = benchmark(monkeypatch, tmp_path, *arguments)
    assert [row["variant"] for row in rows] == ["this", "2 members", "other"]
    assert [row["members"] for row in rows] == [1, 2, 1]
    assert all(row["steps"] > 0 and row["dice"] is not None and row["set"] == "phantom2d" for row in rows)
    assert (tmp_path / "plots/phantom2d.svg").is_file() and (tmp_path / "plots/all.svg").is_file()
    again = benchmark(monkeypatch, tmp_path, *arguments, "--cores", "0")
    assert [row["steps"] for row in again] == [row["steps"] for row in rows]  # finished ones are kept
    assert [row["cores"] for row in again] == [row["cores"] for row in rows]  # as they were trained


def test_the_table_has_medians_and_paired_differences():
    def row(side, seed, dice):
        about = {"set": "acdc", "minutes": 10.0, "seed": seed, "hardware": "CPU", "cores": 2}
        grid = {
            "spacing_mm": "1.5 x 1.5",
            "patch_size": "224 x 256",
            "published": "nnU-Net: .913",
            "published_dice": 0.913,
        }
        return {**about, **grid, "score": "val/dice", "variant": side, "dice": dice, "steps": 100 + seed}

    rows = [row("this", 0, 0.85), row("other", 0, 0.75), row("this", 1, 0.87), row("other", 1, 0.79)]
    text = zoo.show(rows)
    assert "| acdc | 10 | this | 2 | 0.8600 |  | 100 | 1.5 x 1.5, 224 x 256 | nnU-Net: .913 |" in text
    assert "| acdc | 10 | other | 2 | 0.7700 | -9.00 ± 12.71 | 100 | 1.5 x 1.5, 224 x 256 |  |" in text


def test_a_number_of_members_that_is_none_is_refused(monkeypatch, tmp_path, capsys):
    arguments = ["zoo", "--sets", "phantom2d", "--members", "many", "--output", str(tmp_path / "runs")]
    with pytest.raises(AssertionError):
        benchmark(monkeypatch, tmp_path, *arguments)
    assert "--members must be a number or auto, got many" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_picture_of_all_sets_has_a_curve_for_each_variant(monkeypatch, tmp_path):
    def row(name, minutes, variant, dice):
        about = {"set": name, "minutes": minutes, "variant": variant, "dice": dice, "seed": 0}
        return {**about, "hardware": "CPU", "cores": 1, "published_dice": 0.9 if name == "acdc" else None}

    drawn = []
    monkeypatch.setattr(zoo.dice_curves, "draw", lambda curves, path, title: drawn.append((curves, title)))
    rows = [row("acdc", 5.0, "this", 0.8), row("acdc", 20.0, "this", 0.85), row("ct", 5.0, "2 members", 0.7)]
    zoo._draw(rows, tmp_path / "all.svg")
    zoo._draw(rows[:2], tmp_path / "acdc.svg")
    (curves, title), (of_set, _) = drawn
    assert [(c.name, c.points, c.result, c.published) for c in curves] == [
        ("acdc", ((300, 0.8), (1200, 0.85)), 0.85, 0.9),
        ("ct, 2 members", ((300, 0.7),), 0.7, None),
    ]
    assert title == "acdc, ct; CPU, cores: 1" and [c.name for c in of_set] == ["this"]


def test_keys_are_called_as_in_the_checkout(tmp_path):
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/base.yaml").write_text("root: null\ncache: data/prepared\n")
    settings = ["data=msd", "data.root=x", "data.cache_dir=y", "data.splits_file=z"]
    assert zoo._as_called_there(tiny.ROOT, settings) == settings
    assert zoo._as_called_there(tmp_path, settings)[2:] == ["data.cache=y", "data.splits=z"]


@pytest.mark.slow
def test_plans_by_hand_stand_beside_the_default(monkeypatch, tmp_path):
    arguments = ["zoo", "--sets", "phantom2d", "--plans", "--minutes", "0.03", "--output", str(tmp_path)]
    rows = benchmark(
        monkeypatch, tmp_path, *arguments, "--set", "data.num_workers=0", "trainer.accelerator=cpu"
    )
    assert [row["variant"] for row in rows] == [
        "this",
        *(f"{f:g} x spacing, {w}" for f in zoo.COARSER for w in zoo.WIDTHS),
    ]
    assert len({row["spacing_mm"] for row in rows[1:]}) == len(zoo.COARSER)
