"""Scoring of given tokens: files of sequences in, files of log-probabilities out."""
