"""Forwards to loss.py and evaluate.py until every importer uses `maxhydra.train`."""

from maxhydra.train.evaluate import held_out_loss  # noqa: F401
from maxhydra.train.loss import next_token_loss  # noqa: F401
