"""Conversations with audio become rows, and combinations that are not supported are rejected."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.data.audio import make_extractor
from maxhydra.data.record_types import Rejected, build_record_type
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources.tones import make_record
from tests.support.skips import import_optional

soundfile = import_optional("soundfile", extra="audio")

COMMAND = ["task=sft", "model=micro-audio", "data=grain", "data.record_type=audio_chat", "train.seq_len=48"]
COMMAND += ["data.tokenizer.chat_template=lines", "data.max_clips=2", "data.max_seconds=2", "model.audio.begin_id=262"]


def wav(seconds: float, *, rate: int = 16000, kind: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    samples = np.random.default_rng(round(seconds * 100)).uniform(-0.5, 0.5, round(seconds * rate))
    soundfile.write(buffer, samples, rate, format=kind)
    return buffer.getvalue()


def messages(*parts: Any, answer: str = "ok") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]


TEXT, CLIP = {"type": "text", "text": "a"}, {"type": "audio"}


def record_type(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "x.jsonl").write_text("{}\n")
    config = compose([*COMMAND, f"data.path={tmp_path}/x.jsonl", *overrides]).config
    return build_record_type(config.data, config.data, RowSpec.of(config)), config.model.audio


def test_rows_have_tokens_and_frames_of_clips(tmp_path: Path) -> None:
    made, audio = record_type(tmp_path)
    (tmp_path / "b.flac").write_bytes(wav(1.7, kind="FLAC"))
    clips = [wav(0.4), str(tmp_path / "b.flac")]
    (example,) = made.encode([{"messages": messages(CLIP, TEXT, CLIP), "audios": clips}])
    row = made.row(example, 48)
    lengths = [int(0.4 * 16000) // audio.hop_length, int(1.7 * 16000) // audio.hop_length]
    first, second = ([262, *[audio.placeholder_id] * audio.num_tokens(length)] for length in lengths)
    tokens = [256, *first, ord("a"), *second, ord("\n"), *b"ok", 257]
    assert row["tokens"][: len(tokens) - 1].tolist() == tokens[:-1]
    assert row["targets"][row["weights"] > 0].tolist() == [*b"ok", 257]
    assert row["audio_lengths"].tolist() == lengths
    assert row["audio"].shape == (2, audio.num_frames(2.0), audio.num_bands)
    settings = {"hop_length": audio.hop_length, "n_fft": audio.frame_length, "feature_size": audio.num_bands}
    extractor = make_extractor({"feature_extractor_type": "WhisperFeatureExtractor", **settings})
    expected = extractor([soundfile.read(io.BytesIO(clips[0]), dtype="float32")[0]]).features[0]
    np.testing.assert_allclose(row["audio"][0, : lengths[0]], expected, atol=1e-6)
    assert not row["audio"][0, lengths[0] :].any()


def test_loss_never_counts_tokens_of_audio(tmp_path: Path) -> None:
    made, audio = record_type(tmp_path, "data.loss_on=all")
    (example,) = made.encode([{"messages": messages(TEXT, CLIP), "audios": [{"bytes": wav(0.5)}]}])
    row = made.row(example, 48)
    counted = row["targets"][row["weights"] > 0]
    assert audio.placeholder_id in row["targets"] and audio.placeholder_id not in counted
    assert ord("a") in counted


def test_invalid_records(tmp_path: Path) -> None:
    made, _ = record_type(tmp_path)
    clip = wav(0.5)
    records = [
        ({"messages": messages(TEXT), "audios": [clip]}, "has 1 audio clips, but 0 audio parts"),
        ({"messages": messages(CLIP, CLIP), "audios": [clip]}, "has 1 audio clips, but 2 audio parts"),
        ({"messages": messages(*[CLIP] * 3), "audios": [clip] * 3}, "more than data.max_clips=2"),
        ({"messages": messages(CLIP), "audios": ["/nowhere.wav"]}, "no such file"),
        ({"messages": messages(CLIP), "audios": [clip[:30]]}, "not readable"),
        ({"messages": messages(CLIP), "audios": [wav(2.5)]}, "is 2.5 seconds long; accepted: up to 2 seconds"),
        ({"messages": messages(CLIP), "audios": [{"array": [0.0] * 9, "sampling_rate": 0}]}, "the sampling rate 0"),
        ({"messages": messages(CLIP), "audios": [wav(0.001)]}, "has no frame"),
        ({"messages": messages({"type": "image"}), "audios": []}, "content"),
        ({"messages": messages(CLIP)}, "has no column 'audios'"),
    ]
    for example, (_, reason) in zip(made.encode([record for record, _ in records]), records, strict=True):
        assert isinstance(example, Rejected) and reason in example.reason, (example, reason)


def test_generated_tones_are_batches() -> None:
    config = compose(["task=sft", "model=micro-audio", "data=tones", "train.seq_len=32"]).config
    made = build_record_type(config.data, config.data, RowSpec.of(config))
    (example,) = made.encode([make_record(3)])
    row = made.row(example, 32)
    audio = config.model.audio
    assert row["audio_lengths"].tolist() == [10] and row["audio"].shape == (1, 16, audio.num_bands)
    reply = make_record(3)["answer"].encode()
    assert row["targets"][row["weights"] > 0].tolist() == [*reply, 257]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=micro"], "needs a model that takes audio"),
        (["task=dpo"], "is not supported by task=dpo"),
        (["data.packing.method=best_fit"], "is not supported by data.record_type=audio_chat"),
        (["mesh.sequence=2"], "is not supported with audio"),
    ],
)
def test_combinations_that_are_not_supported(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose(["task=sft", "model=micro-audio", "data=tones", "train.seq_len=32", *overrides])
