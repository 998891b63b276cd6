from medconv.cli.main import main
if __name__ == "__main__":
    main("train")
