"""Processes, files, signals, hardware and logging: nothing about images or networks."""
