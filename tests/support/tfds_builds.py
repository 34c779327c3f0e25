"""tfds builds and OLMo shards, made without TensorFlow."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.skips import import_optional

tfds = import_optional("tensorflow_datasets", extra="data")
RecordWriter = import_optional("tensorboardX.record_writer", extra="tensorboard").RecordWriter


class Letters(tfds.core.GeneratorBasedBuilder):
    """A builder with text, token ids, and features that tfds must decode."""

    count = 0
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        turn = {"role": tfds.features.Text(), "content": tfds.features.Text()}
        features = {
            "text": tfds.features.Text(),
            "ids": tfds.features.Sequence(np.int64),
            "n": np.int64,
            "messages": tfds.features.Sequence(turn),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager: Any) -> dict[str, Iterator[tuple[int, Any]]]:
        train = self._generate_examples(0, self.count)
        return {"train": train, "validation": self._generate_examples(self.count, self.count + 10)}

    def _generate_examples(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        for i in range(first, last):
            messages = [{"role": "user", "content": f"m{i}"}] * (i % 3)
            yield i, {"text": f"é{i}", "ids": list(range(i % 7)), "n": i, "messages": messages}


def build_letters(folder: Path, count: int) -> None:
    """Build with tfds, in three ArrayRecord files per split."""
    Letters.count = count
    builder = Letters(data_dir=folder, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))


def build_c4(folder: Path, version: str, split: str, payloads: list[dict[str, Any]], features: Any) -> None:
    """Write a build in the layout of tfds with TFRecord files, which tfds itself reads only with TensorFlow."""
    root = folder / "c4" / "en" / version
    root.mkdir(parents=True)
    connector = tfds.features.FeaturesDict(features)
    writer = RecordWriter(str(root / f"c4-{split}.tfrecord-00000-of-00001"))
    for payload in payloads:
        writer.write(connector.serialize_example(payload))
    writer.close()
    connector.save_config(str(root))
    shards = {"name": split, "shardLengths": [str(len(payloads))], "numBytes": "1"}
    shards["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    info = {"name": "c4", "configName": "en", "version": version, "fileFormat": "tfrecord", "splits": [shards]}
    (root / "dataset_info.json").write_text(json.dumps(info))


def build_olmo(folder: Path, seq_len: int, **shards: np.ndarray) -> str:
    """Write files as published: without header, with names under another root. Returns the path of the index."""
    entries = []
    for name, tokens in shards.items():
        tokens.tofile(folder / f"{name}.npy")
        entries.append({"path": f"gs://bucket/{name}.npy", "label": "x", "n_tokens": len(tokens)})
    index = {"format_version": "1", "sequence_length": seq_len, "dtype": "uint32", "files": entries}
    (folder / "index.json").write_text(json.dumps(index))
    return str(folder / "index.json")


def write_tfds(folder: Path) -> list[str]:
    build_letters(folder, 700)
    return ["data=tfds", "data.name=letters", f"data.data_dir={folder}", "data.eval_split=validation"]


def write_c4(folder: Path) -> list[str]:
    text = [{"text": f"document {i} of several"} for i in range(600)]
    build_c4(folder, "3.0.4", "train2", text, {"text": tfds.features.Text()})
    ids = [{"ids": np.arange(2, 33)}]
    build_c4(folder, "3.0.5", "validation_tokenized_5662seqs", ids, {"ids": tfds.features.Sequence(np.int64)})
    return ["data=c4_mlperf", f"data.data_dir={folder}"]


def write_olmo(folder: Path) -> list[str]:
    """Overrides for sequences of 32 tokens."""
    random = np.random.default_rng(0)
    shards = {name: random.integers(0, 60_000, size, np.uint32) for name, size in (("a", 20_000), ("b", 9_000))}
    path = build_olmo(folder, 32, **shards)
    return ["data=olmo", f"data.path={path}", "data.remap_from=gs://bucket/", f"data.remap_to={folder}/"]
