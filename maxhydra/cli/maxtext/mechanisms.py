"""Mechanisms that a MaxText config switches on for any model: N:M sparsity."""

from maxhydra.cli.maxtext.translation import Translation


def sparsity(t: Translation) -> None:
    """Set optimizer.sparsity; without both numbers there is none, and its schedule has no effect."""
    sizes = {"weight_sparsity_n": "n", "weight_sparsity_m": "m"}
    if not t.trains or None in (t.settings[key] for key in sizes):
        return
    schedule = {"weight_sparsity_start_step": "start_step", "weight_sparsity_update_step": "update_every"}
    for key, name in (sizes | schedule).items():
        t.set(f"optimizer.sparsity.{name}", t.settings.count(key), from_keys=(key,))
