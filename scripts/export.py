"""Thin entry point: the same as `medconv-export`."""

from medconv.export import main

if __name__ == "__main__":
    main()
