"""Translation of MaxText configs: a table of keys, and functions for those that depend on each other."""
