"""Golden models: `python tests/parity/zoo/make.py FAMILY...` writes golden/FAMILY from zoo/FAMILY.json.

    config.json, model.safetensors   a random model saved by transformers, in bfloat16
    gradients.safetensors            gradients of the mean loss under the same names, in float32
    expected.npz                     ids and mask [2, 300], the second row padded on the left; logits; loss

The JSON file holds keyword arguments of the transformers config. Its key `vary` has further values per argument, from
which test_parity.py samples, and `padding` the padded tokens if there are not 70: transformers counts the windows of
compressed attention from the first column, padding included. Needs the parity extra.
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

ZOO = Path(__file__).parent
GOLDEN = ZOO.parent / "golden"
LENGTH, PADDING = 300, 70


def families() -> list[str]:
    return sorted(path.name.removesuffix(".json") for path in ZOO.glob("*.json"))


def settings_of(family: str, *, seed: int | None = None) -> dict[str, Any]:
    """The keyword arguments of a family; with a seed, a random choice from its variations."""
    settings: dict[str, Any] = json.loads((ZOO / f"{family}.json").read_text())
    variations = settings.pop("vary", {})
    if seed is not None:
        rng = random.Random(f"{family} {seed}")
        settings |= {name: rng.choice(values) for name, values in sorted(variations.items())}
    return settings


def make(folder: Path, settings: dict[str, Any]) -> None:
    """Write a golden model."""
    padding = settings.get("padding", PADDING)
    model = random_model({name: value for name, value in settings.items() if name != "padding"})
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, (2, LENGTH))
    mask = np.ones((2, LENGTH), np.int32)
    mask[1, :padding] = 0
    loss, logits = run(model, ids, mask)
    loss.backward()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "expected.npz", ids=ids.astype(np.int32), mask=mask, logits=logits, loss=loss.item())
    state = model.state_dict(keep_vars=True)
    gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad.clone() for name, w in state.items()}
    save(model.bfloat16(), None, folder)
    with tempfile.TemporaryDirectory() as temporary:
        save(model.float(), gradients, Path(temporary))
        save_file(load_file(Path(temporary) / "model.safetensors"), folder / "gradients.safetensors")


def save(model: Any, state: dict[str, Any] | None, folder: Path) -> None:
    """Save with transformers, so that names and layouts are those of published files."""
    model.save_pretrained(folder, state_dict=state)
    (folder / "generation_config.json").unlink(missing_ok=True)


def random_model(settings: dict[str, Any]) -> Any:
    """A random float32 model whose weights are exact in bfloat16, with eager attention, which every model supports."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**settings)
    config._attn_implementation = "eager"
    model = auto_class(config).from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():
                is_scale = weight.ndim == 1 and not name.endswith("bias")
                # A state that decays within a few tokens would hide errors further back.
                mean = -2.0 if name.endswith("A_log") else 1.0 if is_scale else 0.0
                weight.normal_(mean, 0.15 if weight.ndim > 1 else 0.1)
                weight.copy_(weight.bfloat16().float())
            elif weight.ndim == 2:
                # Experts by token id: different ones for each token.
                weight.copy_(torch.rand(len(weight), config.num_local_experts).argsort()[:, : weight.shape[1]])
    return model


def auto_class(config: Any) -> Any:
    """The class that builds a language model of this config; some text models are listed with multimodal ones only."""
    causal = transformers.AutoModelForCausalLM
    return causal if type(config) in causal._model_mapping else transformers.AutoModelForImageTextToText


def run(model: Any, ids: np.ndarray, mask: np.ndarray) -> tuple[Any, np.ndarray]:
    """Mean loss of unmasked tokens that follow unmasked tokens, and all logits."""
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    tokens, real, position_ids = (torch.from_numpy(array.astype(np.int64)) for array in (ids, mask, positions))
    logits = model(input_ids=tokens, attention_mask=real, position_ids=position_ids, use_cache=False).logits
    counts = (real[:, 1:] * real[:, :-1]).float()
    scores = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return -(scores * counts).sum() / counts.sum(), logits.detach().numpy()


if __name__ == "__main__":
    for family in sys.argv[1:] or families():
        make(GOLDEN / family, settings_of(family))
        size = sum(path.stat().st_size for path in (GOLDEN / family).iterdir())
        print(f"{family}: {size // 1000} kB")
