"""What makes a training step fast, and where its time goes."""
