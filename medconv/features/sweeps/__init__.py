"""Sweeps: many runs of one command, one after another, by a batch system, or chosen by Optuna."""

# `medconv train -m` hands over to it
COMMANDS = {
    "sweep": ("train once for each combination of settings, as train -m", "medconv.features.sweeps.command")
}
