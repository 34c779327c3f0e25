"""Training speed of transformers under torch.compile, the peer of `bench/pretrain.py`. One JSON line.

    python bench/peers/train_hf.py --model llama3.2-1b --batch 8
    python bench/peers/train_hf.py --model qwen3-30b-a3b model.num_layers=8 --batch 4 2 1
    python bench/peers/train_hf.py --model gpt-oss-20b model.num_layers=6 --batch 4 1 --attention flex_attention

The same work: fused AdamW over float32 weights, gradient clipping, bfloat16 autocast, flash attention, grouped matmuls
of experts, random weights and random tokens; the same output fields and the same FLOP count. Measures the first of the
batch sizes that fits in device memory. --checkpointing recomputes activations. On a CPU (--device cpu) in float32 and
not compiled.
"""

import argparse
import datetime
import gc
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from model_hf import cast_experts, random_model, wait_for_turn

from maxhydra.config.compose.composer import compose
from maxhydra.model import flops_per_token
from maxhydra.runtime.detect import hardware_options, matches_device

WARM_UP = 3


def training_step(model: transformers.PreTrainedModel, *, batch: int, seq_len: int) -> Callable[[], torch.Tensor]:
    """A function that runs one step on random tokens and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    device = model.device.type

    @torch.compile(disable=device == "cpu")
    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    def step() -> torch.Tensor:
        loss = loss_of(torch.randint(0, model.config.vocab_size, (batch, seq_len), device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], torch.Tensor], times: int) -> tuple[float, float]:
    """Mean seconds of one run, and the result of the last."""
    finish()
    start = time.perf_counter()
    for _ in range(times):
        last = run()
    finish()
    return (time.perf_counter() - start) / times, last.item()


class Measured(NamedTuple):
    batch: int
    compile_seconds: float
    step_time: float
    losses: tuple[float, float]


def measure(model: transformers.PreTrainedModel, *, batches: list[int], seq_len: int, steps: int) -> Measured:
    """Time the first batch size that fits; the error of the last one if none does."""
    for batch in batches:
        try:
            step = training_step(model, batch=batch, seq_len=seq_len)
            compile_seconds, first = seconds(step, 1)
            seconds(step, WARM_UP - 1)
            step_time, last = seconds(step, steps)
            return Measured(batch, compile_seconds, step_time, (first, last))
        except torch.OutOfMemoryError:
            if batch == batches[-1]:
                raise
        # After the handler, whose traceback holds the activations.
        del step
        model.zero_grad(set_to_none=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    raise ValueError("no batch size")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attention", help="implementation of transformers; default: sdpa where supported")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("overrides", nargs="*", help="of the model, such as model.num_layers=8")
    return parser.parse_intermixed_args()


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    model_config = compose([f"model={options.model}", *options.overrides]).config.model
    wait_for_turn()
    model = random_model(model_config, dtype=torch.float32, device=options.device, attention=options.attention).train()
    if options.device != "cpu":
        cast_experts(model)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    measured = measure(model, batches=options.batch, seq_len=options.seq_len, steps=options.steps)

    tokens, step_time = measured.batch * options.seq_len, measured.step_time
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    tflops = tokens * flops_per_token(model_config, options.seq_len) / step_time / 1e12
    known = [hardware for hardware in hardware_options().values() if matches_device(hardware, device)]
    peak = next((hardware.peak_tflops.get("bfloat16") for hardware in known), None)
    line = {
        "bench": "pretrain",
        "peer": f"transformers {transformers.__version__}, torch {torch.__version__}",
        **vars(options),
        "device": device,
        "date": datetime.date.today().isoformat(),
        "batch": measured.batch,
        "attention": model.config._attn_implementation,
        "tokens_per_second": round(tokens / step_time),
        "step_ms": round(step_time * 1e3, 2),
        "tflops_per_device": round(tflops, 1),
        "mfu": round(tflops / peak, 4) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
        "compile_s": round(measured.compile_seconds, 1),
        "loss": [round(loss, 4) for loss in measured.losses],
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
