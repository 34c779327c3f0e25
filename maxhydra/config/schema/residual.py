"""Schema of the residual stream between layers: hyper-connections."""

from maxhydra.config.declare import Schema, option, schema


@schema
class HyperConnections(Schema):
    """Manifold-constrained hyper-connections (Xie et al., 2025): several residual streams, mixed at every branch."""

    streams: int = option(1, ge=1, le=16)
    """Residual streams, each of width emb_dim. A branch reads a weighted sum of them and is added to each with a weight
    of its own; the weights depend on the token. 1: one stream, to which branches are added."""
    sinkhorn_iterations: int = option(20, ge=1, le=100)
    """Column and row normalizations by which the matrix that mixes the streams becomes doubly stochastic."""
