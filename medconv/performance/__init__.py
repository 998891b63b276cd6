"""What makes a training step fast, where its time goes, and what limits it."""
