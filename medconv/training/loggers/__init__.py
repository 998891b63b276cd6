"""Loggers: `metrics.csv`, Weights & Biases, MLflow."""
