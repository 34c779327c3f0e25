"""Small files of every kind that a source reads, and the overrides that read them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tests.support.skips import import_optional

COUNT = 230


def documents(count: int = COUNT) -> list[str]:
    """Distinct texts of 3 to 120 letters."""
    rng = np.random.default_rng(0)
    return [f"{i}: " + "".join(rng.choice(list("abcdefgh "), size=int(rng.integers(1, 115)))) for i in range(count)]


def write_jsonl(folder: Path) -> list[str]:
    texts = documents()
    for part in range(2):
        lines = [json.dumps({"text": text, "n": i}) for i, text in enumerate(texts) if i % 2 == part]
        (folder / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")
    return ["data=grain", f"data.path={folder}/*.jsonl"]


def write_arrayrecord(folder: Path) -> list[str]:
    from array_record.python.array_record_module import ArrayRecordWriter

    texts = documents()
    for part in range(3):
        writer = ArrayRecordWriter(str(folder / f"part{part}.array_record"), "group_size:4")
        for text in texts[part::3]:
            writer.write(json.dumps({"text": text}).encode())
        writer.close()
    return ["data=grain", f"data.path={folder}", "data.packing.method=first_fit"]


def write_tokens(folder: Path) -> list[str]:
    from array_record.python.array_record_module import ArrayRecordWriter

    from maxhydra.data.formats.payload import encode_arrays

    writer = ArrayRecordWriter(str(folder / "tokens.array_record"), "group_size:1")
    for text in documents():
        writer.write(encode_arrays({"tokens": np.frombuffer(text.encode(), np.uint8).astype(np.uint16)}))
    writer.close()
    return ["data=grain", f"data.path={folder}", "data.record_type=tokens", "data.packing.method=concat_then_split"]


def write_parquet(folder: Path) -> list[str]:
    pa, pq = (import_optional(name, extra="data") for name in ("pyarrow", "pyarrow.parquet"))
    pq.write_table(pa.table({"body": documents()}), folder / "a.parquet", row_group_size=9)
    return ["data=grain", f"data.path={folder}/a.parquet", "+data.columns.text=body"]


def write_tfrecord(folder: Path) -> list[str]:
    import struct

    from maxhydra.data.formats.tfrecord import masked_crc32c

    def length_prefixed(tag: int, body: bytes) -> bytes:
        size, out = len(body), bytearray([tag])
        while size > 127:
            out.append(size & 127 | 128)
            size >>= 7
        return bytes([*out, size]) + body

    with (folder / "a.tfrecord").open("wb") as file:
        for text in documents():
            value = length_prefixed(0x0A, length_prefixed(0x0A, text.encode()))
            entry = length_prefixed(0x0A, b"text") + length_prefixed(0x12, value)
            record = length_prefixed(0x0A, length_prefixed(0x0A, entry))
            head = struct.pack("<Q", len(record))
            file.write(head + masked_crc32c([head]).tobytes() + record + masked_crc32c([record]).tobytes())
    return ["data=grain", f"data.path={folder}/a.tfrecord", "data.packing.method=none"]


def write_hf(folder: Path) -> list[str]:
    datasets = import_optional("datasets", extra="data")
    datasets.Dataset.from_dict({"text": documents()}).save_to_disk(str(folder / "saved"))
    return ["data=hf", f"data.name={folder}/saved"]


def write_hf_streaming(folder: Path) -> list[str]:
    return ["data=hf", *write_jsonl(folder)[1:], "data.streaming=true", f"data.eval_path={folder}/part0.jsonl"]


def write_text(folder: Path) -> list[str]:
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n".join(documents()[number::3]))
    return ["data=text", f"data.path={folder}"]


def write_mixture(folder: Path) -> list[str]:
    for name, write in {"lines": write_jsonl, "table": write_parquet}.items():
        (folder / name).mkdir()
        write(folder / name)
    lines = f"lines:{{source:grain,path:{folder}/lines}}"
    table = f"table:{{source:grain,path:{folder}/table,columns:{{text:body}}}}"
    sources = f"+data.sources={{{lines},{table},made:{{source:synthetic}}}}"
    return ["data=mixture", sources, "+data.weights={lines:0.5,table:0.3,made:0.2}"]


def write_build(name: str, folder: Path) -> list[str]:
    """A build of tests/support/tfds_builds.py, imported late because its libraries take seconds to import."""
    from tests.support import tfds_builds as builds

    overrides: list[str] = getattr(builds, f"write_{name}")(folder)
    return overrides


WRITERS: dict[str, Callable[[Path], list[str]]] = {
    "demo": lambda folder: ["data=demo", "train.seq_len=1024", "model.context_length=1024"],
    "synthetic": lambda folder: ["data=synthetic"],
    "arithmetic": lambda folder: ["data=arithmetic", "data.problems=300", "data.packing.method=none"],
    "text": write_text,
    "jsonl": write_jsonl,
    "arrayrecord": write_arrayrecord,
    "tokens": write_tokens,
    "parquet": write_parquet,
    "tfrecord": write_tfrecord,
    "hf": write_hf,
    "hf_streaming": write_hf_streaming,
    "tfds": partial(write_build, "tfds"),
    "c4_mlperf": partial(write_build, "c4"),
    "olmo": partial(write_build, "olmo"),
    "mixture": write_mixture,
}
