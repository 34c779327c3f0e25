"""Block diffusion against transformers: loss and gradients with an explicit mask, and decoding without a cache."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema.diffusion import Diffusion
from maxhydra.config.schema.run import Train
from maxhydra.model.block_decoder import BlockDecoder
from maxhydra.model.diffusion import add_noise
from maxhydra.train import likelihood_loss
from maxhydra.train.objective import _noise_key
from tests.support.golden_models import SINGLE, Golden, relative_errors
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

from safetensors.torch import save_file  # noqa: E402

pytestmark = pytest.mark.parity

GOLDEN = Path(__file__).parent / "golden" / "llama"
SIZE, MASK, ROWS, LENGTH = 3, 63, 3, 10
DIFFUSION = Diffusion(block_size=SIZE, mask_token=MASK)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def golden() -> Golden:
    golden = Golden(GOLDEN)
    config = dataclasses.replace(golden.model.config, diffusion=DIFFUSION)
    golden.model = dataclasses.replace(golden.model, config=config)
    return golden


@pytest.fixture(scope="module")
def expected_model() -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(GOLDEN, **options).eval()


def make_batch() -> dict[str, jax.Array]:
    """A whole row, a row of two documents, and a document followed by padding; a part of the tokens has a loss."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MASK, (ROWS, LENGTH + 1)).astype(np.int32)
    segments, positions = np.ones((ROWS, LENGTH), np.int32), np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    segments[1, 4:], positions[1, 4:] = 2, np.arange(LENGTH - 4)
    segments[2, 7:], positions[2, 7:] = 0, 0
    weights = (rng.uniform(size=(ROWS, LENGTH)) < 0.8).astype(np.float32) * (segments > 0)
    columns = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return {name: jnp.asarray(x) for name, x in {**columns, "positions": positions, "segments": segments}.items()}


def visible(batch: dict[str, np.ndarray], row: int) -> np.ndarray:
    """The mask of Arriola et al. (2025), token by token: an index under LENGTH is noised, the others are clean."""
    segment, place = batch["segments"][row], batch["positions"][row]
    mask = np.zeros((2 * LENGTH, 2 * LENGTH), bool)
    for q in range(2 * LENGTH):
        for k in range(2 * LENGTH):
            i, j = q % LENGTH, k % LENGTH
            if segment[i] != segment[j] or segment[i] == 0:
                continue
            # Block 0 is the first token of the document; a noised token is the one after its index.
            a = place[i] // SIZE + 1 if q < LENGTH else int(np.ceil(place[i] / SIZE))
            b = place[j] // SIZE + 1 if k < LENGTH else int(np.ceil(place[j] / SIZE))
            if q < LENGTH and k < LENGTH:
                mask[q, k] = a == b
            elif q < LENGTH:
                mask[q, k] = b < a
            else:
                mask[q, k] = k >= LENGTH and b <= a
    return mask


def expected_loss(model: Any, batch: dict[str, np.ndarray], noised: np.ndarray, scale: np.ndarray) -> Any:
    """The NELBO in torch, from logits of transformers with the explicit mask and positions."""
    ids = torch.from_numpy(np.concatenate([noised, batch["tokens"]], axis=1).astype(np.int64))
    places = torch.from_numpy(np.concatenate([batch["positions"] + 1, batch["positions"]], axis=1).astype(np.int64))
    seen = torch.from_numpy(np.stack([visible(batch, row) for row in range(ROWS)]))[:, None]
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, :LENGTH]
    targets = torch.from_numpy(batch["targets"].astype(np.int64))[..., None]
    scores = torch.log_softmax(logits, dim=-1).gather(-1, targets)[..., 0]
    return -(scores * torch.from_numpy(batch["weights"] * scale)).sum()


@pytest.mark.slow
def test_loss_and_gradients_equal_those_of_torch(golden: Golden, expected_model: Any, tmp_path: Path) -> None:
    batch, key = make_batch(), jax.random.key(3)
    loss = likelihood_loss(golden.model, SINGLE, Train())  # type: ignore[call-arg]
    found, gradients = jax.jit(jax.value_and_grad(lambda p: loss(p, batch, key)["loss"]))(golden.params)
    noised = add_noise(batch["targets"], batch["positions"] + 1, batch["weights"], DIFFUSION, _noise_key(batch, key))
    arrays = {name: np.asarray(column) for name, column in batch.items()}
    expected_model.zero_grad()
    expected = expected_loss(expected_model, arrays, np.asarray(noised.tokens_BS), np.asarray(noised.scale_BS))
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    expected.backward()
    save_file({name: w.grad.clone() for name, w in expected_model.named_parameters()}, tmp_path / "gradients")
    errors = relative_errors(jax.device_get(gradients), jax.device_get(golden.load_tensors(tmp_path / "gradients")))
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.slow
@pytest.mark.default_cases("2-6")
@pytest.mark.parametrize(("steps", "prompt_length"), [(None, 1), (2, 6), (1, 7)])
def test_cached_decoding_equals_full_forward_passes(
    golden: Golden, expected_model: Any, steps: int | None, prompt_length: int
) -> None:
    """Greedy decoding, each step a forward pass of transformers over the whole sequence."""
    prompt = [5, 9, 40, 2, 33, 7, 12][:prompt_length]
    decoder = BlockDecoder(golden.model, golden.params, SINGLE, steps)
    found = [token for block in decoder.blocks(tuple(prompt), 14, temperature=0.0, seed=0) for token in block]
    sequence = list(prompt)
    while len(sequence) < 14:
        end = 1 + ((len(sequence) - 1) // SIZE + 1) * SIZE
        sequence += [MASK] * (end - len(sequence))
        for step in range(steps or SIZE):
            masked = [at for at, token in enumerate(sequence) if token == MASK]
            if not masked:
                break
            block = [int(np.ceil(at / SIZE)) for at in range(end)]
            seen = torch.tensor([[b <= a for b in block] for a in block])[None, None]
            mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
            with torch.no_grad():
                logits = expected_model(
                    input_ids=torch.tensor([sequence]),
                    attention_mask=mask,
                    position_ids=torch.arange(end)[None],
                    use_cache=False,
                ).logits[0]
            logits[:, MASK] = -torch.inf
            best, token = torch.softmax(logits, dim=-1).max(dim=-1)
            count = -(-len(masked) // ((steps or SIZE) - step))
            for at in sorted(masked, key=lambda at: -float(best[at]))[:count]:
                sequence[at] = int(token[at])
    assert found == sequence[prompt_length:]
