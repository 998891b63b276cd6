"""Learning-rate schedules in steps, exponential, or of one cycle, as those of torch."""
