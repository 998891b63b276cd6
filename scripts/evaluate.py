"""Thin entry point: the same as `medconv-evaluate`."""

from medconv.evaluate import main

if __name__ == "__main__":
    main()
