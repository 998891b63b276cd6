"""The command: which parts run, in which order and how long; what is printed and written as they end."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_checks import machine, part, report
from gpu_checks.claims import GROUPS, Claim, of_group
from gpu_checks.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs/gpu-queue.md", ROOT / "docs/results"
_TINY_LIMIT = 10  # times a part's limit in the tiny form, where speed means nothing and machines are busy
_LEAST_S = 15.0  # a part is not begun with less time left
_ANSWERED = ("holds", "missed", "ran", "skipped")
# What parts use; imported once, before the first is forked.
_LIBRARIES = ("lightning", "monai.losses", "monai.networks.nets", "medconv.training.run", "medconv.cli.train")


def main(words: Sequence[str] | None = None) -> int:
    """Returns: 0, or 1 where a claim failed, timed out or was missed."""
    options = _parser().parse_args(words)
    if options.write_docs:
        PAGE.write_text(report.page(_claims(GROUPS)[0], RESULTS.glob("*.json")))
        return 0
    claims, broken = _claims(GROUPS)
    if options.list:
        print("\n".join(f"{claim.group:12} {claim.name:24} {claim.text}" for claim in claims))
        return 0
    try:
        done = report.read(options.json) if options.json else {}
    except ValueError as error:
        raise SystemExit(f"gpu_check.py: {error}") from None
    chosen = _chosen(claims, options.part, set(broken))
    if options.missing:
        chosen = [c for c in chosen if done.get(c.name, {}).get("verdict") not in _ANSWERED]
    return _check(chosen, broken, done, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_check.py", description="Check every claim about CUDA here.")
    add = parser.add_argument
    add("--part", nargs="+", metavar="NAME", help=f"of {', '.join(GROUPS)}, or parts by name; else all")
    add("--minutes", type=float, help="no part is begun that would not end within them")
    add("--json", type=Path, metavar="FILE", help="results, written after every part; others in it stay")
    add("--missing", action="store_true", help="leave out parts that FILE has an answer of")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="small sizes, to test the parts themselves")
    add("--list", action="store_true", help="print the parts and end")
    add("--write-docs", action="store_true", help="write docs/gpu-queue.md and end")
    return parser


def _claims(groups: Sequence[str]) -> tuple[list[Claim], dict[str, str]]:
    """All claims; and groups that could not be imported, with the traceback."""
    claims: list[Claim] = []
    broken: dict[str, str] = {}
    for group in groups:
        try:
            claims += of_group(group)
        except Exception:
            broken[group] = traceback.format_exc()
    return claims, broken


def _chosen(claims: Sequence[Claim], names: Sequence[str] | None, broken: set[str]) -> list[Claim]:
    """In the order of the names. Raises: SystemExit: a name is unknown."""
    known = {name for claim in claims for name in (claim.name, claim.group)} | broken
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise SystemExit(f"gpu_check.py: no part {', '.join(unknown)}; --list prints them")
    if names is None:
        return list(claims)
    chosen = {c.name: c for name in names for c in claims if name in (c.name, c.group)}
    return list(chosen.values())


def _check(
    claims: Sequence[Claim], broken: dict[str, str], results: dict[str, Any], options: argparse.Namespace
) -> int:
    begun, bad = time.monotonic(), []
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for CUDA does not begin it
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        _import_libraries()
        about = machine.describe(options.device, Path(folder) / "machine")
        _print(f"{about}\n\n{report.line(*report.COLUMNS)}")
        for group, error in broken.items():
            if options.part is None or group in options.part:
                _print(f"{group}: none of its parts can run\n{error}")
                bad.append(group)
        for claim in claims:
            left = (
                float("inf") if options.minutes is None else 60 * options.minutes - time.monotonic() + begun
            )
            if left < _LEAST_S:
                _print(f"{claim.name}: not begun, {options.minutes:g} minutes are over")
                continue
            folders = Path(folder) / claim.name, Path(folder) / "shared"
            limit_s = min(claim.limit_s * (_TINY_LIMIT if options.tiny else 1), left)
            setting = Setting(options.device, options.tiny, *folders, limit_s)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            result = part.run(claim, setting)
            again = f"python scripts/gpu_check.py --device {options.device} --part {claim.name}"
            again += " --tiny" * options.tiny
            results[claim.name] = {"group": claim.group, "begun": now, "command": again, **result}
            _print("\n".join(report.rows(claim, result, about["hardware"], options.tiny)))
            if result["verdict"] in report.BAD:
                bad.append(claim.name)
                _print(f"    again: {again}\n    on: {about}")
            if options.json:
                report.write(options.json, about, results)
    seconds = time.monotonic() - begun
    _print(f"\n{len(claims)} parts in {seconds:.0f} s; not as claimed: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def _import_libraries() -> None:
    import importlib

    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception:  # the parts that need it will say so
            _print(f"importing {name} failed:\n{traceback.format_exc()}")


def _print(text: str) -> None:
    print(text, flush=True)
