"""`medconv-replay`: a training step whose loss or gradient was not finite, once more, from the batch that the run saved."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medconv import checkpoint, commands, performance, tracing, trust
from medconv.building import Values, build_network, fitted_loss, outcome_of
from medconv.performance.hardware import autocast_dtype
from medconv.predict import usable_device
from medconv.pretrained import freeze
from medconv.targets import Targets
from medconv.tasks import Classification, Regression, Segmentation, Task
from medconv.trained import DAMAGED

_LOSSES = (*trust.NETWORKS, "monai.losses")  # whose classes a loss may be of
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def main() -> None:
    sys.exit(commands.guard(_main))


def _main() -> int:
    options = _parser().parse_args()
    commands.start_logging()
    logging.getLogger("medconv.building").setLevel(logging.WARNING)
    about, rows = replay(options.file, options.allow, usable_device(options.device))
    print(commands.shown(f"{heading(about)}\n{table(rows)}"))
    bad = tracing.first_bad(rows)
    if bad is None:
        raise ValueError(f"{options.file}: does not occur again here, all numbers are finite; another --device may show it")
    print(f"shown again, first: {commands.shown(bad.words())}")
    return commands.DONE


def replay(path: Path, trusted: Sequence[str] = (), device: str = "cpu") -> tuple[Values, list[tracing.Row]]:
    """What a run wrote of such a step, and the rows of its batch's pass through the network as it was before the step.

    Args: trusted: packages of your own that network and loss may come from.
    Raises: ValueError: missing, damaged, no such file of a run, or naming a class that is not allowed.
    """
    content = checkpoint.read(path)
    about = content.get("nonfinite")
    if not isinstance(about, dict):
        raise ValueError(f"{path}: a checkpoint without a batch; a run that stopped writes one to nonfinite/stepN.ckpt")
    try:
        values = content["medconv"]["config"]
        task = _task(values, content["medconv"], trusted)
        checkpoint.need_fit(task, content, str(path))
        task.load_state_dict(content["state_dict"])
        task.to(device)
        heading(about)
        return about, _rows(task, about, str(values["trainer"]["precision"]))
    except DAMAGED as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: damaged, or of another version: its step cannot be run ({reason})") from error


def heading(about: Values) -> str:
    return f"step {int(about['step'])}, rank {int(about['rank'])}: {commands.some([str(case) for case in about['cases']])}"


def table(rows: Sequence[tracing.Row]) -> str:
    """A line for each tensor of the pass, in the order of computation."""
    width = max(len(f"{row.name} ({row.kind})") for row in rows)
    lines = [f"{'':<{width}}  {'':<19}  {'not finite':>21}  {'min':>10}  {'max':>10}"]
    for row in rows:
        share = f"{row.bad} of {row.total}" if row.bad else "-"
        low, high = ("-" if value is None else f"{value:.4g}" for value in (row.low, row.high))
        lines.append(f"{f'{row.name} ({row.kind})':<{width}}  {row.what:<19}  {share:>21}  {low:>10}  {high:>10}")
    return "\n".join(lines)


def _task(values: Values, record: Values, trusted: Sequence[str]) -> Task:
    known, perf = values["facts"], values["perf"]
    network = build_network(values, known["patch_size"], partial(trust.build_trusted, trusted=trusted))
    if frozen := values.get("init", {}).get("freeze"):
        freeze(network, frozen)  # whose norms do not look at the batch
    fast = {key: perf[key] for key in ("channels_last", "fast_norm", "fast_depthwise")}
    performance.apply_switches(network, **fast)
    built = trust.build_trusted(values["loss"], "loss", trusted, _LOSSES)
    loss = fitted_loss(built, {**known, "targets": record["targets"]})
    layout = performance.memory_format(perf["channels_last"], known["spatial_dims"])
    common: Values = {"optimizer": _unused, "scheduler": _unused, "record": {}, "memory_format": layout}
    task = _kind(values, record)(network, loss, **common)
    return task.to(_TRUE.get(str(values["trainer"]["precision"]), torch.float32))


def _kind(values: Values, record: Values) -> Callable[..., Task]:
    """The task's class with what the record says that it is asked for."""
    known, own, outcome = values["facts"], values["task"], outcome_of(values["facts"])
    if outcome is not None:
        kind = Regression if outcome.kind == "numbers" else Classification
        mixing = {"seed": values["seed"], "mixup": own["mixup"]}
        return partial(kind, outcome=outcome, spatial_dims=known["spatial_dims"], **mixing)
    return partial(
        Segmentation,
        targets=Targets.from_plain(record["targets"]),
        patch_size=known["patch_size"],
        to_native=_unused,
        deep_supervision=own["deep_supervision"],
    )


def _rows(task: Task, about: Values, precision: str) -> list[tracing.Row]:
    image, label = (about["batch"][key].to(task.device) for key in ("image", "label"))
    batch = {"image": image, "label": label, "sample": about["batch"].get("sample")}
    tracing.set_generators(about["rng"], task.device)
    kind = autocast_dtype(precision)
    with torch.autocast(task.device.type, dtype=kind, enabled=kind is not None):
        return tracing.trace(task, batch, lambda: task.loss_of(batch), float(about["scale"]))


def _unused(*_: Any) -> Any:
    raise AssertionError("a replayed step has no optimizer and validates nothing")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("medconv-replay", description=__doc__)
    add = parser.add_argument
    add("--file", type=Path, required=True, help="RUN/nonfinite/stepN.ckpt, as the message of the run names it")
    add("--device", help="cpu, cuda, cuda:1, ...; the accelerator where there is one")
    add("--allow", action="append", default=[], metavar="PACKAGE", help="trust network and loss classes of a package")
    return parser


if __name__ == "__main__":
    main()
