"""Peak host memory of task=convert over a synthetic Hugging Face folder: `python bench/convert_memory.py [GB]`.

Writes random weights of a Llama of that size (default 3 GB), converts them in a separate process, and prints how far
its resident memory rose above the level after imports.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from maxhydra.convert.hf_write import write_safetensors

WIDTH, HIDDEN, HEAD_DIM, VOCAB, KV_HEADS = 2048, 8192, 64, 32000, 8
CONVERT = """
import resource, sys
from maxhydra.cli import entry
from maxhydra import tasks
from maxhydra.tasks import convert
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
code = entry.run(sys.argv[1:])
print(f"peak {before / 1e6:.3f} {peak() / 1e6:.3f}")
sys.exit(code)
"""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of the Llama."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(layers):
        layer_tensors = {
            **{
                f"self_attn.{name}_proj": (rows, WIDTH)
                for name, rows in {"q": WIDTH, "k": 512, "v": 512, "o": WIDTH}.items()
            },
            **{"mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH), "mlp.down_proj": (WIDTH, HIDDEN)},
            **{"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)},
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_tensors.items()}
    return tensors


def write(folder: Path, gigabytes: float) -> float:
    """Write a folder of about that size in bfloat16; returns its exact size."""
    per_layer = sum(int(np.prod(shape)) for name, shape in shapes(1).items() if "layers" in name) * 2
    layers = max(1, round(gigabytes * 1e9 / per_layer))
    settings = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": WIDTH, "intermediate_size": HIDDEN}
    settings |= {"num_attention_heads": WIDTH // HEAD_DIM, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB}
    settings |= {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    block = np.random.default_rng(0).normal(size=2**20).astype(ml_dtypes.bfloat16)
    path, dtype = folder / "model.safetensors", np.dtype(ml_dtypes.bfloat16)
    write_safetensors(path, shapes(layers), (np.resize(block, shape) for shape in shapes(layers).values()), dtype=dtype)
    return path.stat().st_size / 1e9


def measure(folder: Path, output: Path, *overrides: str) -> tuple[float, float]:
    """Peak resident memory in GB before the conversion, and at its end."""
    arguments = ["task=convert", "model=from_hf", f"model.path={folder}", f"task.output={output}", *overrides]
    process = subprocess.run(
        [sys.executable, "-c", CONVERT, *arguments, "task.dtype=bfloat16"], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(process.stderr)
    before, peak = map(float, process.stdout.rsplit("peak", 1)[1].split())
    return before, peak


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in"
        source.mkdir()
        size = write(source, float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
        for format_name in ("hf", "maxhydra"):
            before, peak = measure(source, Path(folder) / format_name, f"task.format={format_name}")
            print(
                f"{format_name}: {size:.2f} GB converted, peak {peak - before:.2f} GB over the {before:.2f} GB at start"
            )
