"""Composition: YAML files and overrides are merged, checked and validated into one `Config`."""
