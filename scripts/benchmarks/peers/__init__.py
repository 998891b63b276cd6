"""What others train with, each in a process of its own that works when it is told to."""
