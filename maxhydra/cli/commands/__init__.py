"""Subcommands: one file each, found by its name.

A file has a docstring, whose first line `maxhydra --help` shows, and `main(arguments) -> exit code`.
"""
