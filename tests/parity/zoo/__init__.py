"""Keyword arguments of a tiny transformers config per family: <family>.json."""
