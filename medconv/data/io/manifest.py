"""The manifest of a folder of predictions: which networks and settings made them, of which images.

`inference/output.py` writes it.
"""

import json
from pathlib import Path
from typing import Any

MANIFEST = "prediction.json"  # beside the predictions
LOWER_BOUNDS = "lower_bounds"  # its key for those of all results, which a later command adds
TABLE = "predictions.csv"  # in a folder of answers that are no images


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest; empty where there is none, or where it is damaged or of another version."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        is_valid = isinstance(manifest["settings"], dict)
        cases = list(manifest["cases"].values())
        is_valid &= all(0 < len(case["images"]) == len(case["stamps"]) for case in cases)
        lists = [manifest["overwriting"], manifest.get("train_cases", [])]
        lists += [case["images"] for case in cases]
        is_valid &= all(isinstance(names, list) for names in lists)
        is_valid &= all(isinstance(name, str) for names in lists for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return manifest if is_valid else {}
