"""Sweeps: jobs, result tables, Slurm job arrays, Optuna searches."""
