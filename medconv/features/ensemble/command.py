"""`medconv ensemble`: train the members of an ensemble, and say what each one gained."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from medconv.cli.parsers import Parser, add_package
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

AUTO = "auto"  # of --members
_SHARED_KEYS = (
    *("data.root", "data.images", "data.labels", "data.class_names", "data.regions"),
    *("data.ignore_label", "data.source_spacing_mm"),
)

if TYPE_CHECKING:
    from medconv.config import RunConfig


def parser() -> Parser:
    command = Parser(
        "ensemble",
        "--members 3 data=msd data.root=/data/Task04 trainer.max_time=00:00:20:00 run.name=NAME",
        "Train several networks of one config, which predict as one: their mean.\n"
        "Each member has the time and the steps of the config; with --members auto all share\n"
        "trainer.max_time. The first is the run that medconv train makes of the same arguments; the\n"
        "others, with other seeds, are in its folder members/. With --vary they differ in more.\n"
        "If the command was stopped, the same one resumes it; with a larger number it adds members.\n"
        "With trainer.devices=N, N members train at once, each on a device of its own.",
        takes_overrides=True,
    )
    group = command.add_argument_group("members")
    group.add_argument(
        "--members", required=True, metavar="N", help="how many, at least 2; auto: as many as the time is for"
    )
    group.add_argument(
        "--folds", action="store_true", help="each validates another fold, and trains on the others"
    )
    group.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="members have these values in turn, such as data.spatial_dims=3,2; may be repeated: each "
        "combination",
    )
    add_package(command.general())
    return command


def run_command(options: argparse.Namespace) -> int:
    """Train all members, then compare them. Returns: the exit code, of the first member that failed."""
    from medconv.config import compose
    from medconv.config.trusted import packages_of
    from medconv.features.ensemble import gains, members, shares
    from medconv.training.run_dir import RunDir

    start_logging()
    flags = compose.hydra_flags(options.overrides, "medconv ensemble", options.package)
    if flags.only_shows:
        from medconv.cli.show import show

        show(flags)
        return DONE
    _check_vary(options)
    variants = compose.combinations(options.vary) if options.vary else [[]]
    found = [_composed(options, variant) for variant in variants]
    (config, choices), *_ = found
    for member_config, _ in found:
        _check(options, member_config, variants)
    folder = RunDir.of(config, choices)
    packages = [argument for name in options.package for argument in ("--package", name)]
    arguments = [*options.overrides, *packages]
    devices = members.devices_of(config)
    if options.members == AUTO:
        rounds = shares.rounds(config, folder, devices)
        needed = ceil(len(variants) / len(devices))
        if rounds < needed and folder.resume_from() is not None:
            raise ValueError(
                f"{folder.path}: trainer.max_time is {rounds} times the run's own, and --vary needs {needed}"
            )
        rounds = max(rounds, needed)
        count = rounds * len(devices)
        arguments = [*members.with_keys(arguments, [f"trainer.max_time={shares.share(config, rounds)}"])]
    else:
        count = int(options.members)
    ensemble = members.members_of(config, folder, arguments, count, options.folds, variants)
    if config.run.dry_run:
        print(members.plan(ensemble))
        return DONE
    code = members.train(ensemble, devices)
    if code == DONE:
        # Classes that this command's configs name are the user's choice
        own = [package for each, _ in found for package in packages_of(each.model, each.conv)]
        packages = list(dict.fromkeys([*options.package, *own]))
        gains.write(ensemble, config, packages)
        print(gains.table(folder, packages))
    return code


def _check_vary(options: argparse.Namespace) -> None:
    """Raises: ValueError: a key that members have of their own, or that makes them answer something else."""
    from medconv.config.compose import is_key_value

    refused = {
        "seed": "each member has its own",
        "run": "members share the folder of the run",
        "trainer.devices": "each member has one device",
        "trainer.num_nodes": "an ensemble trains on one machine",
        **dict.fromkeys(_SHARED_KEYS, "members are of one dataset and answer the same"),
    }
    if options.members == AUTO:
        refused["trainer.max_time"] = "--members auto shares it"
    if options.folds:
        refused["data.fold"] = "--folds gives each member its own"
    for argument in options.vary:
        if not is_key_value(argument):
            raise ValueError(f"--vary takes KEY=A,B, got {argument}")
        key = argument.partition("=")[0].lstrip("+~")
        for name, reason in refused.items():
            if key == name or key.startswith(f"{name}."):
                raise ValueError(f"--vary {argument}: {reason}")
        if key == "data":
            raise ValueError(f"--vary {argument}: members are of one dataset")


def _composed(options: argparse.Namespace, variant: Sequence[str]) -> tuple[RunConfig, Mapping[str, str]]:
    """The checked config of a member, and Hydra's choices. Args: variant: its own settings."""
    from medconv.config import compose, validate
    from medconv.features.ensemble.members import with_keys
    from medconv.training.checks import check_config

    arguments = with_keys(options.overrides, variant)
    composer = compose.Composer(compose.hydra_flags(arguments, "medconv ensemble", options.package))
    if composer.is_sweep:
        raise ValueError("medconv ensemble trains one config, got several; medconv train -m runs a sweep")
    (composed,) = composer.configs()
    config = validate(composed.values)
    check_config(config)
    return config, composed.choices


def _check(options: argparse.Namespace, config: RunConfig, variants: Sequence[Sequence[str]]) -> None:
    """Raises: ValueError: a number or a setting that an ensemble cannot have."""
    from medconv.features.ensemble.members import num_folds
    from medconv.utils import cluster

    number = options.members
    if number != AUTO and not (number.isdecimal() and int(number) >= 2):
        raise ValueError(f"--members must be auto or at least 2, got {number}; medconv train trains one")
    if number != AUTO and int(number) < len(variants):
        left_out = " ".join(variants[int(number)])
        raise ValueError(f"--members {number} leaves out {left_out}: --vary has {len(variants)} combinations")
    if options.folds and number == AUTO:
        raise ValueError("--folds needs a number of members, got --members auto")
    if options.folds and not str(config.data.fold).isdecimal():
        raise ValueError(f"--folds needs the number of a fold, got data.fold={config.data.fold}")
    if options.folds and int(number) > (count := num_folds(config)):
        setting = config.data.splits_file or "data.num_folds"
        raise ValueError(f"--members {number} --folds: there are {count} folds; {setting} sets them")
    launcher = cluster.launcher()
    if launcher is not None:
        raise ValueError(f"its members start their own processes; run it without {launcher.name}")
    if config.trainer.num_nodes not in (None, 1):
        raise ValueError(
            f"trainer.num_nodes={config.trainer.num_nodes}: an ensemble trains on one machine; on several, "
            "start medconv train with another seed and run.dir on each"
        )
    if config.run.resume not in ("auto", "never"):
        raise ValueError(
            f"run.resume={config.run.resume}: members resume from their own checkpoints; expected auto or "
            "never"
        )
