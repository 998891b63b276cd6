"""Benchmarks that anyone can run: `python scripts/benchmark.py NAME`; each number stands beside its peer
of the same run.
"""
