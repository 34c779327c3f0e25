"""Subcommands, one discovered file each.

A file has a docstring, whose first line `maxhydra --help` shows, and `main(arguments) -> exit code`.
"""
