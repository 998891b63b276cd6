"""`perf=auto`: measures which switches are fastest here and remembers it."""
