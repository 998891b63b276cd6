"""Thin entry point: the same as `medconv-predict`."""

from medconv.predict import main

if __name__ == "__main__":
    main()
