"""Input pipeline speed, relative to alternatives in the same process. One JSON line per case, best of a few rounds.

python bench/data.py jsonl         read, tokenize and pack, against the tokenizer alone and against `datasets`
python bench/data.py arrayrecord   pretokenized data, to rows on the host and to arrays on a device
python bench/data.py packing       fill and speed of each packing method, and of grain's packers
python bench/data.py wait          share of a small training step spent waiting for input
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from maxhydra.config.schema.data import Data, Packing, PackingMethod
from maxhydra.config.schema.data import Tokenizer as TokenizerConfig
from maxhydra.data import BatchSpec, RowSpec, host_loader, train_loader
from maxhydra.data.formats.payload import encode_arrays
from maxhydra.data.packing import plan_rows
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import Document, pack_rows
from maxhydra.data.shards import WRITER_OPTIONS
from maxhydra.data.sources.demo import TEXT

SEQ_LEN, BATCH, VOCABULARY = 4096, 8, 8192
MEAN, SIGMA = 600, 1.0
ROUNDS = 3
# 25 MB of text; fewer on a busy machine.
DOCUMENTS = int(os.environ.get("DOCUMENTS", "12000"))


def lengths(count: int, mean: float = MEAN) -> np.ndarray:
    """Document lengths: log-normal with this mean."""
    samples = np.random.default_rng(0).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.maximum(2, samples).astype(np.int64)


def make_tokenizer(folder: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer of 8192 entries on the plays."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        [str(TEXT)],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return tokenizer


def write_texts(path: Path, count: int, tokenizer: Tokenizer) -> list[str]:
    """Write documents cut from the plays at random, MEAN tokens long on average."""
    plays = TEXT.read_text(encoding="utf-8")
    characters_per_token = len(plays) / sum(
        len(encoding.ids) for encoding in tokenizer.encode_batch(plays.splitlines(keepends=True))
    )
    sizes = lengths(count, MEAN * characters_per_token)
    starts = np.random.default_rng(1).integers(0, len(plays) - 1, count)
    twice = plays * 2
    texts = [twice[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def spec() -> BatchSpec:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return BatchSpec(rows=RowSpec(seq_len=SEQ_LEN, vocab_size=VOCABULARY, seed=0), batch=BATCH, sharding=sharding)


def best_speeds(*functions: Callable[[], float], rounds: int = ROUNDS) -> list[float]:
    """The best speed of each function; rounds are interleaved, so that background load does not hit only one."""
    return [
        max(speeds) for speeds in zip(*([function() for function in functions] for _ in range(rounds)), strict=True)
    ]


def speed_of(
    make_loader: Callable[[Data, BatchSpec], Any],
    data: Data,
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Tokens per second over `tokens` tokens, including opening the files. With time.process_time: per core-second."""
    start_time = clock()
    loader = make_loader(data, spec())
    count = 0
    for batch in loader:
        count += SEQ_LEN * BATCH
        if count >= tokens:
            jax.block_until_ready(batch)
            break
    elapsed = clock() - start_time
    filled = count * (1 - loader.metrics()["data/padding"])
    loader.close()
    return float(filled / elapsed)


def speed_of_all(data: Data, clock: Callable[[], float]) -> float:
    """Tokens per second over every record once, to rows on the host, without unused read-ahead."""
    start_time = clock()
    pipeline = Pipeline(data, spec().rows)
    (stream,) = pipeline.held_out()
    with suppress(StopIteration):
        while True:
            stream.take()
    elapsed = clock() - start_time
    pipeline.close()
    return stream.stats.filled / elapsed


def jsonl(folder: Path) -> dict[str, Any]:
    tokenizer = make_tokenizer(folder / "tokenizer")
    texts = write_texts(folder / "texts.jsonl", DOCUMENTS, tokenizer)
    total = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))

    def encode_only(encode: Callable[..., Any], clock: Callable[[], float]) -> float:
        start_time = clock()
        for at in range(0, len(texts), 128):
            encode(texts[at : at + 128], add_special_tokens=False)
        return total / (clock() - start_time)

    config = TokenizerConfig(kind="hf", path=str(folder / "tokenizer"))
    path, cache = str(folder / "texts.jsonl"), str(folder / "cache")
    data = Data(source="grain", path=path, eval_path=path, cache=cache, tokenizer=config)
    figures: dict[str, Any] = {"megabytes": round((folder / "texts.jsonl").stat().st_size / 1e6, 1)}
    for unit, clock in (("second", time.perf_counter), ("core_second", time.process_time)):
        slow, fast, own_speed, datasets_speed = best_speeds(
            partial(encode_only, tokenizer.encode_batch, clock),
            partial(encode_only, tokenizer.encode_batch_fast, clock),
            partial(speed_of_all, data, clock),
            partial(with_datasets, folder, tokenizer, clock),
        )
        figures[unit] = {
            "tokens": round(own_speed),
            "of_encode_batch": round(own_speed / slow, 3),
            "of_encode_batch_fast": round(own_speed / fast, 3),
            "of_datasets_map_and_pack": round(own_speed / datasets_speed, 2),
        }
    return figures


def with_datasets(folder: Path, tokenizer: Tokenizer, clock: Callable[[], float]) -> float:
    """The usual `datasets` pipeline: map a tokenizer over batches, map concatenate-and-split, read rows as NumPy."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        return {"input_ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(rows["text"])]}

    def pack(rows: dict[str, list]) -> dict[str, list]:
        tokens = np.concatenate([np.array(ids, np.int32) for ids in rows["input_ids"]])
        whole = len(tokens) // SEQ_LEN * SEQ_LEN
        return {"input_ids": tokens[:whole].reshape(-1, SEQ_LEN)}  # type: ignore[dict-item]

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        start_time = clock()
        files = str(folder / "texts.jsonl")
        loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
        tokens = loaded.map(tokenize, batched=True, remove_columns=["text"])
        rows = tokens.map(pack, batched=True, remove_columns=["input_ids"]).with_format("numpy")
        count = sum(len(batch["input_ids"]) for batch in rows.iter(BATCH)) * SEQ_LEN
        return count / (clock() - start_time)


def arrayrecord(folder: Path) -> dict[str, Any]:
    sizes = lengths(50_000)
    random = np.random.default_rng(2)
    tokens = random.integers(0, VOCABULARY, int(sizes.max()) + 100_000).astype(np.uint16)
    writer = ArrayRecordWriter(str(folder / "tokens.array_record"), WRITER_OPTIONS)
    for start, size in zip(random.integers(0, 100_000, len(sizes)).tolist(), sizes.tolist(), strict=True):
        writer.write(encode_arrays({"tokens": tokens[start : start + size]}))
    writer.close()
    path, cache = str(folder / "tokens.array_record"), str(folder / "cache")
    data = Data(source="grain", path=path, cache=cache, record_type="tokens")
    total = int(sizes.sum() * 0.9)
    host, device, core = best_speeds(
        lambda: speed_of(host_loader, data, total),
        lambda: speed_of(train_loader, data, total),
        lambda: speed_of(host_loader, data, total, time.process_time),
        rounds=2 * ROUNDS,
    )
    return {
        "tokens": total,
        "host_tokens_per_second": round(host),
        "device_tokens_per_second": round(device),
        "host_tokens_per_core_second": round(core),
    }


def packing(folder: Path) -> dict[str, Any]:
    sizes = lengths(16_000)
    documents = [Document(np.arange(size + 1, dtype=np.int32)) for size in sizes.tolist()]
    window = 128 * SEQ_LEN // MEAN

    def pack_all(method: PackingMethod) -> tuple[float, float]:
        start_time = time.perf_counter()
        filled = rows = 0
        for at in range(0, len(documents), window):
            chunk = documents[at : at + window]
            packing_plan = plan_rows(
                np.array([document.num_targets for document in chunk]), SEQ_LEN, Packing(method=method)
            )
            packed = pack_rows(chunk, packing_plan, SEQ_LEN, with_segments=True)
            filled, rows = filled + int(packed.filled.sum()), rows + len(packed)
        return rows / (time.perf_counter() - start_time), filled / rows / SEQ_LEN

    methods = (PackingMethod.best_fit, PackingMethod.first_fit, PackingMethod.concat_then_split)
    packers: dict[str, Callable[[], tuple[float, float]]] = {
        method.name: lambda m=method: pack_all(m) for method in methods
    }  # type: ignore[misc]
    packers |= {
        f"grain_{name}": lambda n=name: with_grain(n, documents) for name in ("best_fit", "first_fit", "concat")
    }  # type: ignore[misc]
    rounds = [{name: packer() for name, packer in packers.items()} for _ in range(ROUNDS)]
    best = {name: max(figures[name] for figures in rounds) for name in packers}
    ratio = best["best_fit"][0] / best["concat_then_split"][0]
    figures = {name: {"rows_per_second": round(speed), "fill": round(fill, 4)} for name, (speed, fill) in best.items()}
    return {**figures, "best_fit_to_concat": round(ratio, 3)}


def with_grain(name: str, documents: list[Document]) -> tuple[float, float]:
    """Grain's packer over the same tokens; documents longer than a sequence are split first, as it requires."""
    import grain

    pieces = [
        {"tokens": document.tokens[at : at + SEQ_LEN][: document.num_targets - at]}
        for document in documents
        for at in range(0, document.num_targets, SEQ_LEN)
    ]
    source = grain.MapDataset.source(pieces).to_iter_dataset(grain.ReadOptions(num_threads=0))
    length = {"tokens": SEQ_LEN}
    if name == "concat":
        packed: Any = grain.experimental.ConcatThenSplitIterDataset(source, length_struct=length)
    elif name == "best_fit":
        packed = grain.experimental.BestFitPackIterDataset(source, length_struct=length, num_packing_bins=128)
    else:
        packed = grain.experimental.FirstFitPackIterDataset(source, length_struct=length, num_packing_bins=128)
    start_time = time.perf_counter()
    rows = sum(1 for _ in packed)
    elapsed = time.perf_counter() - start_time
    return rows / elapsed, sum(len(piece["tokens"]) for piece in pieces) / rows / SEQ_LEN


def wait(folder: Path) -> dict[str, Any]:
    tokenizer = make_tokenizer(folder / "tokenizer")
    write_texts(folder / "texts.jsonl", 4000, tokenizer)
    arguments = [
        *("data=grain", f"data.path={folder / 'texts.jsonl'}", f"data.cache={folder / 'cache'}"),
        *("data.tokenizer.kind=hf", f"data.tokenizer.path={folder / 'tokenizer'}", f"model.vocab_size={VOCABULARY}"),
        *("run.name=wait", "train.steps=60", "train.log_every=10", "train.eval_batches=0", "train.sample.tokens=0"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "maxhydra", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
    lines = (folder / "outputs" / "wait" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "input_wait" in row and row["step"] > 10]
    return {
        "input_wait": round(float(np.mean([row["input_wait"] for row in rows])), 5),
        "step_time": round(float(np.mean([row["step_time"] for row in rows])), 4),
        "tokens_per_second": round(float(np.mean([row["tokens_per_second"] for row in rows]))),
    }


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "jsonl": jsonl,
    "arrayrecord": arrayrecord,
    "packing": packing,
    "wait": wait,
}


def select_cases(names: list[str]) -> Iterator[str]:
    for name in names or CASES:
        if name not in CASES:
            raise SystemExit(f"unknown case {name}; expected {', '.join(CASES)}")
        yield name


def main() -> None:
    for name in select_cases(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            figures = CASES[name](Path(folder))
        print(json.dumps({"bench": f"data {name}", "cores": os.cpu_count(), **figures}), flush=True)


if __name__ == "__main__":
    main()
