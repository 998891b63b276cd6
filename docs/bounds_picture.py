"""Draws lower bounds of Dice against the true Dice of cases that were not used to calibrate them.

`python docs/bounds_picture.py OUTPUT.png NAME=METRICS.json ...`, with files of `medconv evaluate`; their
predictions are with `--quality`. A random half of the cases calibrates the bounds of the others: every second
one would be the systoles of a heart, which are harder than the diastoles.
"""

import random
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from medconv.data.datasets.common import read_json
from medconv.features.bound.bounds import margin

SHARE = 0.9


def main(output: Path, *sets: str) -> None:
    figure, axes = plt.subplots(1, len(sets), figsize=(3.4 * len(sets), 3.6), squeeze=False)
    for panel, text in zip(axes[0], sets, strict=True):
        title, _, path = text.partition("=")
        content = read_json(Path(path))
        true = {row["case"]: row["dice"] for row in content["cases"]}
        held = []
        for number, name in enumerate(content["per_class"]):
            estimated = {case: scores[name] for case, scores in content["quality"]["cases"].items()}
            cases = [case for case in estimated if None not in (estimated[case], true[case][name])]
            random.Random(0).shuffle(cases)
            known, new = cases[: len(cases) // 2], cases[len(cases) // 2 :]
            distance = margin(
                [estimated[case] for case in known], [true[case][name] for case in known], SHARE
            )
            assert distance is not None
            lower = [max(0.0, estimated[case] - distance) for case in new]
            reached = [true[case][name] for case in new]
            held += [a >= b for a, b in zip(reached, lower, strict=True)]
            panel.scatter(reached, lower, s=10, alpha=0.7, linewidths=0, color=f"C{number}", label=name)
        ends = [min(panel.get_ylim()[0], panel.get_xlim()[0]), max(panel.get_ylim()[1], panel.get_xlim()[1])]
        panel.plot(ends, ends, color="0.6", linestyle=":", linewidth=1)
        panel.set(
            title=f"{title}: held in {sum(held)} of {len(held)}", xlabel="true Dice", ylabel="lower bound"
        )
        panel.legend(fontsize=8, loc="upper left", frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
