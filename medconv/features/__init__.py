"""Features that the core works without: a folder each. `medconv/doors.py` says how they enter."""
