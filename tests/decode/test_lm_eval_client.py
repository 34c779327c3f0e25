"""lm-eval's own client for completions scores continuations on the server as the model does."""

import random

import jax
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.decode.sampling_params import PromptEncoder
from tests.decode.test_engine import CONTEXT, logits_without_cache, start
from tests.support.running_server import RunningServer


@pytest.mark.exhaustive
def test_log_likelihoods_of_the_lm_eval_client():
    for package in ("lm_eval", "tenacity"):
        pytest.importorskip(package, reason="needs lm-eval[api]")
    models = pytest.importorskip("lm_eval.models.openai_completions")
    engine = start()
    engine.max_context = CONTEXT
    prompts = PromptEncoder(compose([]).config.data, vocab_size=264)
    server = RunningServer(engine, prompts, max_sequences=20)
    rng = random.Random(0)
    cases = []
    for length in (3, 20, 41):
        ids = [rng.randrange(256) for _ in range(length)]
        cases.append((("", ""), ids[: length // 2], ids[length // 2 :]))
    try:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        client = models.LocalCompletionsAPI(
            model="tiny", base_url=url, tokenizer_backend=None, batch_size=2, max_length=CONTEXT, max_retries=1
        )
        # Token ids are sent as they are; only the presence of a tokenizer is checked.
        client.tokenizer, client.tokenized_requests = prompts.tokenizer, True
        scores = client._loglikelihood_tokens(cases, disable_tqdm=True)
    finally:
        server.end()
    for (_, context, continuation), (logprob, is_greedy) in zip(cases, scores, strict=True):
        ids = [*context, *continuation]
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, : len(ids)] = ids
        expected = np.asarray(jax.nn.log_softmax(logits_without_cache()(row)))
        positions = range(len(context) - 1, len(ids) - 1)
        assert logprob == pytest.approx(sum(expected[p, ids[p + 1]] for p in positions), abs=1e-3)
        assert is_greedy == all(expected[p].argmax() == ids[p + 1] for p in positions)
