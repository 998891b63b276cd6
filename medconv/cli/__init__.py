"""The command `medconv` and its subcommands: parsing of arguments and printing; what they do is imported
when it begins.
"""
