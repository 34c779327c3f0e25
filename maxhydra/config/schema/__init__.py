"""The config schema: every section, its fields, types, defaults and checks."""
