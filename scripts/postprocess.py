"""Thin entry point: the same as `medconv-postprocess`."""

from medconv.postprocess import main

if __name__ == "__main__":
    main()
