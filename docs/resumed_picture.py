"""Draws the curves of a run that was killed and resumed over those of one that was not.

`python docs/resumed_picture.py WHOLE RESUMED KILLED_AT OUTPUT.svg`: the folders of both runs, of one config
and with trainer.log_every_n_steps=1, and the step at which the second was killed.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from omegaconf import OmegaConf

TEAL = "#009688"
GREY = "0.75"
TITLES = {"train/loss": "training loss", "val/dice": "validation Dice"}


def main(whole: Path, resumed: Path, killed_at: int, output: Path) -> None:
    plt.rcParams |= {"svg.hashsalt": "resumed", "svg.fonttype": "none", "font.size": 9}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    runs = {"never stopped": rows_of(whole), f"killed at step {killed_at}, resumed": rows_of(resumed)}
    styles = ((GREY, "-", 5), (TEAL, "-", 1.2))
    for panel, (key, title) in zip(panels, TITLES.items(), strict=True):
        for (label, rows), (colour, line, width) in zip(runs.items(), styles, strict=True):
            panel.plot(*curve(rows, key), color=colour, linestyle=line, linewidth=width, label=label)
        panel.axvline(killed_at, color="black", linestyle=":", linewidth=1)
        panel.set(xlabel="step", title=title)
    panels[0].legend(frameon=False)
    data: Any = OmegaConf.load(whole / "config.yaml")
    largest = max(difference(*runs.values(), key) for key in TITLES)
    figure.suptitle(f"{data.trainer.max_steps} steps; largest difference of all values: {largest:g}")
    figure.savefig(output, metadata={"Date": None})


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curve(rows: list[dict[str, str]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a column."""
    filled = [row for row in rows if row[key]]
    return [int(row["step"]) for row in filled], [float(row[key]) for row in filled]


def difference(rows: list[dict[str, str]], others: list[dict[str, str]], key: str) -> float:
    """The largest of two curves, which must have the same steps."""
    steps, values = curve(rows, key)
    other_steps, other_values = curve(others, key)
    assert steps == other_steps, key
    return max(abs(value - other) for value, other in zip(values, other_values, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
