"""The `medconv` command: parsers and printing. A subcommand imports its work only when it begins."""
