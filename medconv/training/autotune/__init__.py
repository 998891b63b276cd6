"""`perf=autotune`: measures which switches are fastest here and remembers it."""
