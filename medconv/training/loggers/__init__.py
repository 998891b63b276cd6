"""`metrics.csv`, and loggers of other services."""
