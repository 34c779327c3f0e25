"""Composition: option files and overrides in, a validated config with the origin of every value out."""
