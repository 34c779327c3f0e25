"""Schema of hyperparameter transfer from a small model to a wider and deeper one."""

from maxhydra.config.declare import MAX_LAYERS, MAX_WIDTH, Schema, option, schema


@schema
class Transfer(Schema):
    """Initial weights and learning rates that keep the optimal learning rate when width and depth change: muP (Yang et
    al., 2022) for the width, CompleteP (Dey et al., 2025) for the depth. optimizer.learning_rate and weight_decay are
    those of a model with the base sizes; head_dim should be equal in both."""

    base_width: int | None = option(None, ge=1, le=MAX_WIDTH)
    """emb_dim of the model that optimizer.learning_rate was tuned for. null: rates do not depend on the width."""
    base_layers: int | None = option(None, ge=1, le=MAX_LAYERS)
    """num_layers of that model. null: rates do not depend on the depth."""

    @property
    def is_used(self) -> bool:
        return self.base_width is not None or self.base_layers is not None
