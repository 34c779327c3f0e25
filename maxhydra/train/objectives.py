"""Forwards to loss.py and evaluate.py until every importer uses `maxhydra.train`."""

from maxhydra.train.evaluate import held_out_loss
from maxhydra.train.loss import next_token_loss

__all__ = ["held_out_loss", "next_token_loss"]
