"""Draws the README's badges from what they state: pyproject.toml and the workflow of the tests.

`python docs/badges.py docs/images`; tests/test_release.py compares them. None is fetched from another site.
"""

import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
HEIGHT = 20
CHARACTER = 5.9  # width in pixels, of 11 pixels Verdana
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">
  <title>{label}: {value}</title>
  <rect width="{width}" height="{height}" rx="3" fill="#00796b"/>
  <path d="M3 0h{label_width}v{height}H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>
  <g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
    <text x="6" y="14" textLength="{label_text}">{label}</text>
    <text x="{value_at}" y="14" textLength="{value_text}">{value}</text>
  </g>
</svg>
"""


def badges() -> dict[str, str]:
    """File name to SVG."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (need.split(">=")[1] for need in project["dependencies"] if need.startswith("torch>="))
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    texts = {
        "license": project["license"],
        "platform": "Linux",
        "python": project["requires-python"].replace(">=", "") + " or later",
        "torch": f"{oldest} or later",
        "tests": f"Python {pythons[0]} to {pythons[-1]}",
    }
    return {f"badge-{label}.svg": drawn(label, value) for label, value in texts.items()}


def drawn(label: str, value: str) -> str:
    label_text = round(CHARACTER * len(label))
    value_text = round(CHARACTER * len(value))
    label_width = label_text + 12
    return SVG.format(
        label=label,
        value=value,
        height=HEIGHT,
        width=label_width + value_text + 12,
        label_width=label_width - 3,
        label_text=label_text,
        value_at=label_width + 6,
        value_text=value_text,
    )


if __name__ == "__main__":
    for name, svg in badges().items():
        (Path(sys.argv[1]) / name).write_text(svg)
