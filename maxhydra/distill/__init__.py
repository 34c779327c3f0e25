"""Learning from a teacher: divergences from its distributions, its features and its layers."""
