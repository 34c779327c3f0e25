"""Multi-token prediction as data."""

from maxhydra.config.declare import Schema, option, schema


@schema
class Mtp(Schema):
    """Multi-token prediction (DeepSeek-V3, 2024): layers behind the last, of its kind, look further ahead."""

    depth: int = option(0, ge=0)
    """Tokens beyond the next that are predicted, each by a layer of its own that training alone uses. 0: none."""
    loss_weight: float = option(0.3, ge=0)
    """Training adds this times the mean of their cross-entropies."""
