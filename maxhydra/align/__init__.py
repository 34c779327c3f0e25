"""Preference optimization (DPO and variants): losses over completion pairs, and cached reference log-probs."""
