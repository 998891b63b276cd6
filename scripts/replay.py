"""Thin entry point: the same as `medconv-replay`."""

from medconv.replay import main

if __name__ == "__main__":
    main()
