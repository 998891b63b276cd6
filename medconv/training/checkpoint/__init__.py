"""Checkpoints written and resumed, bit for bit."""

BEST = "best.ckpt"  # with the best value of the monitored metric
LAST = "last.ckpt"  # a killed run resumes from it
# The last but one, in case the last one is damaged
PREVIOUS = "previous.ckpt"
