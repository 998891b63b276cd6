"""Checkpoints written and resumed, bit for bit; without states of random generators (`PerStepSeeding`)."""

# A second name of the last.ckpt after the validation whose running mean was the best, see `Ranking`
BEST = "best.ckpt"
LAST = "last.ckpt"  # a killed run resumes from it
# The last but one, in case the last one is damaged
PREVIOUS = "previous.ckpt"
# Key of a checkpoint: the sizes of the run's logs, as `log_files.measure_logs` has them, to which resuming
# cuts them; once only curves were cut
LOG_SIZES = "curves"
