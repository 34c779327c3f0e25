"""Tiny models of every family, by the keyword arguments of their transformers configs: <family>.json."""
