"""Sweeps: many runs of one command, one after another, by Slurm, or chosen by Optuna."""

SWEEPS = ("medconv.features.sweeps.launch:run_sweep",)
