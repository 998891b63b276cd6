"""What others train with, each in a process of its own that takes a training step when it is told to."""
