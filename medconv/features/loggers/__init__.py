"""Loggers that write elsewhere than into the run's folder: Weights & Biases and MLflow."""
