"""Preference optimization (DPO and variants) and reward models: losses over completions, cached reference log-probs."""
