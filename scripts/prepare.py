"""Thin entry point: the same as `medconv-prepare`."""

from medconv.prepare import main

if __name__ == "__main__":
    main()
