"""Thin entry point: the same as `medconv-benchmark`."""

from medconv.benchmark import main

if __name__ == "__main__":
    main()
