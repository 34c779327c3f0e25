"""How fast the input is, in ratios to other ways within one run. One JSON line per case, best of a few rounds.

python bench/data.py jsonl         read, tokenize and pack, against the tokenizer alone and against `datasets`
python bench/data.py arrayrecord   tokens that were made before, to rows on the host and to arrays on a device
python bench/data.py packing       fill and speed of each method, and of grain's packers
python bench/data.py wait          share of a tiny training step that is spent waiting for input
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
from maxhydra.config.schema.tokenizer import Tokenizer as TokenizerConfig
from maxhydra.data import BatchSpec, RowSpec, host_loader, train_loader
from maxhydra.data.array_codec import encode_arrays
from maxhydra.data.document import Document
from maxhydra.data.packing import plan
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import pack_rows
from maxhydra.data.shards import OPTIONS
from maxhydra.data.sources.demo import TEXT

SEQ_LEN, BATCH, VOCABULARY = 4096, 8, 8192
MEAN, SIGMA = 600, 1.0
ROUNDS = 3
# 25 MB of text; fewer on a busy machine.
DOCUMENTS = int(os.environ.get("DOCUMENTS", "12000"))


def lengths(count: int, mean: float = MEAN) -> np.ndarray:
    """Of documents: log-normal, with the mean that was asked for."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.maximum(2, drawn).astype(np.int64)


def make_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE of 8192 entries, learned from the plays."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train(
        [str(TEXT)],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return words


def write_texts(path: Path, count: int, words: Tokenizer) -> list[str]:
    """Documents cut from the plays at random, an average of MEAN tokens long."""
    plays = TEXT.read_text(encoding="utf-8")
    letters = len(plays) / sum(len(found.ids) for found in words.encode_batch(plays.splitlines(keepends=True)))
    sizes = lengths(count, MEAN * letters)
    starts = np.random.default_rng(1).integers(0, len(plays) - 1, count)
    twice = plays * 2
    texts = [twice[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def spec() -> BatchSpec:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return BatchSpec(rows=RowSpec(seq_len=SEQ_LEN, vocab_size=VOCABULARY, seed=0), batch=BATCH, sharding=sharding)


def best(*ways: Callable[[], float], rounds: int = ROUNDS) -> list[float]:
    """The best speed of each way, taken in turns, so that a busy moment does not fall on one alone."""
    return [max(speeds) for speeds in zip(*([way() for way in ways] for _ in range(rounds)), strict=True)]


def speed_of(
    make_loader: Callable[[Data, BatchSpec], Any],
    data: Data,
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Tokens a second over so many, the opening of the files included. By time.process_time, a second of one core."""
    began = clock()
    loader = make_loader(data, spec())
    given = 0
    for batch in loader:
        given += SEQ_LEN * BATCH
        if given >= tokens:
            jax.block_until_ready(batch)
            break
    took = clock() - began
    filled = given * (1 - loader.metrics()["data/padding"])
    loader.close()
    return float(filled / took)


def speed_of_all(data: Data, clock: Callable[[], float]) -> float:
    """Tokens a second over every record once, to rows on the host: nothing is read ahead in vain."""
    began = clock()
    pipeline = Pipeline(data, spec().rows)
    (stream,) = pipeline.held_out()
    with suppress(StopIteration):
        while True:
            stream.take()
    took = clock() - began
    pipeline.close()
    return stream.counts.filled / took


def jsonl(folder: Path) -> dict[str, Any]:
    words = make_tokenizer(folder / "tokenizer")
    texts = write_texts(folder / "texts.jsonl", DOCUMENTS, words)
    total = sum(len(encoding.ids) for encoding in words.encode_batch_fast(texts))

    def alone(encode: Callable[..., Any], clock: Callable[[], float]) -> float:
        began = clock()
        for at in range(0, len(texts), 128):
            encode(texts[at : at + 128], add_special_tokens=False)
        return total / (clock() - began)

    config = TokenizerConfig(kind="hf", path=str(folder / "tokenizer"))
    path, cache = str(folder / "texts.jsonl"), str(folder / "cache")
    data = Data(source="grain", path=path, eval_path=path, cache=cache, tokenizer=config)
    figures: dict[str, Any] = {"megabytes": round((folder / "texts.jsonl").stat().st_size / 1e6, 1)}
    for unit, clock in (("second", time.perf_counter), ("core_second", time.process_time)):
        slow, fast, ours, theirs = best(
            partial(alone, words.encode_batch, clock),
            partial(alone, words.encode_batch_fast, clock),
            partial(speed_of_all, data, clock),
            partial(with_datasets, folder, words, clock),
        )
        figures[unit] = {
            "tokens": round(ours),
            "of_encode_batch": round(ours / slow, 3),
            "of_encode_batch_fast": round(ours / fast, 3),
            "of_datasets_map_and_pack": round(ours / theirs, 2),
        }
    return figures


def with_datasets(folder: Path, words: Tokenizer, clock: Callable[[], float]) -> float:
    """The usual way: map a tokenizer over batches, map a function that joins and cuts, read the rows as NumPy."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        return {"input_ids": [encoding.ids for encoding in words.encode_batch_fast(rows["text"])]}

    def pack(rows: dict[str, list]) -> dict[str, list]:
        joined = np.concatenate([np.array(ids, np.int32) for ids in rows["input_ids"]])
        whole = len(joined) // SEQ_LEN * SEQ_LEN
        return {"input_ids": joined[:whole].reshape(-1, SEQ_LEN)}  # type: ignore[dict-item]

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        began = clock()
        files = str(folder / "texts.jsonl")
        loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
        tokens = loaded.map(tokenize, batched=True, remove_columns=["text"])
        rows = tokens.map(pack, batched=True, remove_columns=["input_ids"]).with_format("numpy")
        count = sum(len(batch["input_ids"]) for batch in rows.iter(BATCH)) * SEQ_LEN
        return count / (clock() - began)


def arrayrecord(folder: Path) -> dict[str, Any]:
    sizes = lengths(50_000)
    random = np.random.default_rng(2)
    tokens = random.integers(0, VOCABULARY, int(sizes.max()) + 100_000).astype(np.uint16)
    writer = ArrayRecordWriter(str(folder / "tokens.array_record"), OPTIONS)
    for start, size in zip(random.integers(0, 100_000, len(sizes)).tolist(), sizes.tolist(), strict=True):
        writer.write(encode_arrays({"tokens": tokens[start : start + size]}))
    writer.close()
    path, cache = str(folder / "tokens.array_record"), str(folder / "cache")
    data = Data(source="grain", path=path, cache=cache, record_type="tokens")
    total = int(sizes.sum() * 0.9)
    host, device, core = best(
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

    def ours(method: PackingMethod) -> tuple[float, float]:
        began = time.perf_counter()
        filled = rows = 0
        for at in range(0, len(documents), window):
            some = documents[at : at + window]
            made = plan(np.array([document.places for document in some]), SEQ_LEN, Packing(method=method))
            packed = pack_rows(some, made, SEQ_LEN, with_segments=True)
            filled, rows = filled + int(packed.filled.sum()), rows + len(packed)
        return rows / (time.perf_counter() - began), filled / rows / SEQ_LEN

    methods = (PackingMethod.best_fit, PackingMethod.first_fit, PackingMethod.concat_then_split)
    ways: dict[str, Callable[[], tuple[float, float]]] = {method.name: lambda m=method: ours(m) for method in methods}  # type: ignore[misc]
    ways |= {f"grain_{name}": lambda n=name: with_grain(n, documents) for name in ("best_fit", "first_fit", "concat")}  # type: ignore[misc]
    rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS)]
    found = {name: max(figures[name] for figures in rounds) for name in ways}
    ratio = found["best_fit"][0] / found["concat_then_split"][0]
    figures = {name: {"rows_per_second": round(speed), "fill": round(fill, 4)} for name, (speed, fill) in found.items()}
    return {**figures, "best_fit_to_concat": round(ratio, 3)}


def with_grain(name: str, documents: list[Document]) -> tuple[float, float]:
    """Grain's packer over the same tokens; documents over the sequence are split for it first, as it wants them."""
    import grain

    pieces = [
        {"tokens": document.tokens[at : at + SEQ_LEN][: document.places - at]}
        for document in documents
        for at in range(0, document.places, SEQ_LEN)
    ]
    source = grain.MapDataset.source(pieces).to_iter_dataset(grain.ReadOptions(num_threads=0))
    length = {"tokens": SEQ_LEN}
    if name == "concat":
        packed: Any = grain.experimental.ConcatThenSplitIterDataset(source, length_struct=length)
    elif name == "best_fit":
        packed = grain.experimental.BestFitPackIterDataset(source, length_struct=length, num_packing_bins=128)
    else:
        packed = grain.experimental.FirstFitPackIterDataset(source, length_struct=length, num_packing_bins=128)
    began = time.perf_counter()
    rows = sum(1 for _ in packed)
    took = time.perf_counter() - began
    return rows / took, sum(len(piece["tokens"]) for piece in pieces) / rows / SEQ_LEN


def wait(folder: Path) -> dict[str, Any]:
    words = make_tokenizer(folder / "tokenizer")
    write_texts(folder / "texts.jsonl", 4000, words)
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


def chosen(names: list[str]) -> Iterator[str]:
    for name in names or CASES:
        if name not in CASES:
            raise SystemExit(f"{name}: no such case; there are {', '.join(CASES)}")
        yield name


def main() -> None:
    for name in chosen(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            figures = CASES[name](Path(folder))
        print(json.dumps({"bench": f"data {name}", "cores": os.cpu_count(), **figures}), flush=True)


if __name__ == "__main__":
    main()
