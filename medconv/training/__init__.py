"""One training run: assembly, tasks, losses, optimizers, callbacks, checkpoints, run folder."""
