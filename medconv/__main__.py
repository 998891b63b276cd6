"""`python -m medconv`: the same as `medconv`."""

from medconv.cli.main import main

if __name__ == "__main__":
    main()
