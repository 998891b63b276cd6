"""Benchmarks that anyone can run: `python scripts/benchmark.py NAME`; each compares with a
peer in the same run.
"""
