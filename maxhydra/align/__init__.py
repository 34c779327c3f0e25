"""Learning from preferences: losses over pairs of answers, and what the reference model makes of them."""
