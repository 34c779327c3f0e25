"""Conversations with images become rows, and combinations that are not supported are rejected."""

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.data.audio import make_extractor
from maxhydra.data.image_tokens import MARKER, ImageTokenizer, image_ids, insert_images, read_images
from maxhydra.data.images import ProcessedImage
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.record_types import Rejected, build_record_type
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources.shapes import COLOURS, make_record
from maxhydra.data.tokenizers import load_tokenizer
from tests.support.containers import matroska
from tests.support.skips import import_optional

COMMAND = ["task=sft", "model=gemma3-tiny-vision", "data=grain", "data.record_type=image_chat", "train.seq_len=48"]
COMMAND += ["data.tokenizer.chat_template=lines", "data.max_images=2"]


def png(colour: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 5), colour).save(buffer, "PNG")
    return buffer.getvalue()


def messages(*parts: Any, answer: str = "ok") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]


TOKENS = {"placeholder_id": "image_token", "begin_id": "boi_token", "end_id": "eoi_token"}
HEARD = ["model=qwen3-omni-tiny-media", "model.vision.videos.use_audio_in_video=true"]
TEXT, IMAGE = {"type": "text", "text": "a"}, {"type": "image"}


def record_type(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "x.jsonl").write_text("{}\n")
    config = compose([*COMMAND, f"data.path={tmp_path}/x.jsonl", *overrides]).config
    return build_record_type(config.data, config.data, RowSpec.of(config)), config.model.vision


def test_rows_have_tokens_and_pixels_of_images(tmp_path: Path) -> None:
    made, vision = record_type(tmp_path)
    (tmp_path / "blue.png").write_bytes(png((0, 0, 255)))
    images = [png((255, 0, 0)), str(tmp_path / "blue.png")]
    (example,) = made.encode([{"messages": messages(IMAGE, TEXT, IMAGE), "images": images}])
    row = made.row(example, 48)
    ids = image_ids(ProcessedImage(row["images"][:1], None, vision.projector.tokens), vision)
    image = [*b"\n\n", *ids, *b"\n\n"]
    tokens = [256, *image, ord("a"), *image, ord("\n"), *b"ok", 257]
    assert row["tokens"][: len(tokens) - 1].tolist() == tokens[:-1]
    assert row["targets"][row["weights"] > 0].tolist() == [*b"ok", 257]
    assert row["images"].shape == (2, vision.image_size, vision.image_size, 3)
    np.testing.assert_allclose(row["images"][:, 0, 0], [[1, -1, -1], [-1, -1, 1]])


def test_rows_have_the_tiles_of_images(tmp_path: Path) -> None:
    """Images of one and of three squares; rows have space for the most squares of data.max_images images."""
    made, vision = record_type(tmp_path, "model=llama4-tiny-vision", "data.loss_on=all")
    images = [np.zeros((9, 16, 3), np.uint8), np.full((40, 12, 3), 255, np.uint8)]
    (example,) = made.encode([{"messages": messages(IMAGE, TEXT, IMAGE), "images": images}])
    row = made.row(example, 48)
    tile = [300] * vision.projector.tokens
    small, large = [301, 305, *tile, 302], [301, *tile, 304, *tile, 304, *tile, 304, 305, *tile, 302]
    tokens = [256, *small, ord("a"), *large, ord("\n"), *b"ok", 257]
    assert row["tokens"][: len(tokens) - 1].tolist() == tokens[:-1]
    assert row["images"].shape == (2 * (vision.tiles.max_tiles + 1), 16, 16, 3)
    # White images fill their canvas up to black padding, which is -1; squares without a tile are 0.
    assert row["images"][:, 0, 0, 0].tolist() == [-1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    counted = row["targets"][row["weights"] > 0].tolist()
    assert counted == [id for id in tokens[1:] if id != vision.placeholder_id]


@pytest.mark.slow
def test_rows_have_the_steps_of_videos(tmp_path: Path) -> None:
    """Eight frames at 4 per second are sampled at 2 per second: two steps of 1 x 2 tokens, the first and last frame."""
    made, _ = record_type(tmp_path, "model=qwen3-vl-tiny", "data.max_images=3", "train.seq_len=96", "data.loss_on=all")
    np.save(tmp_path / "video.npy", np.full((8, 8, 16, 3), 255, np.uint8))
    video = {"path": str(tmp_path / "video.npy"), "fps": 4}
    step, image = [302, 301, 301, 303], [302, 300, 300, 303]
    times = [*b"<0.2 seconds>", *step, *b"<1.5 seconds>", *step]
    content = [{"type": "video", "video": video["path"], "fps": 4}, TEXT, IMAGE]
    images = [np.zeros((7, 17, 3), np.uint8)]
    (inline,) = made.encode([{"messages": messages(*content), "images": images}])
    (column,) = made.encode(
        [{"messages": messages({"type": "video"}, TEXT, IMAGE), "images": images, "videos": [video]}]
    )
    tokens = [256, *times, ord("a"), *image, ord("\n"), *b"ok", 257]
    for example in (inline, column):
        row = made.row(example, 96)
        assert row["tokens"][: len(tokens) - 1].tolist() == tokens[:-1]
        np.testing.assert_array_equal(row["images"][:, 0, 2], [1, 1, -1])
        counted = row["targets"][row["weights"] > 0].tolist()
        assert counted == [id for id in tokens[1:] if id not in (300, 301)]
    missing, extra, still = made.encode(
        [
            {"messages": messages({"type": "video"}), "images": []},
            {"messages": messages(IMAGE), "images": images, "videos": [video]},
            {"messages": messages({"type": "video", "video": "absent.npy"})},
        ]
    )
    assert "has 0 videos, but 1 video parts" in missing.reason and "has 1 videos, but 0 video parts" in extra.reason
    assert "no such file" in still.reason
    few, _ = record_type(tmp_path, "model=qwen3-vl-tiny", "data.max_images=2")
    (rejected,) = few.encode([{"messages": messages(*content), "images": images}])
    assert rejected.reason == "has 3 images, more than data.max_images=2"
    none, _ = record_type(tmp_path)
    (rejected,) = none.encode([{"messages": messages({"type": "video"}), "videos": [video]}])
    assert "the model takes no videos" in rejected.reason


@pytest.mark.slow
def test_frames_of_gemma4_have_minutes_and_steps_of_qwen3_omni_no_text(tmp_path: Path) -> None:
    """Frames of 8 x 24 pixels: one row of 3 tokens. Gemma 4 sees four of five frames, each of them a step."""
    np.save(tmp_path / "video.npy", np.full((5, 8, 24, 3), 255, np.uint8))
    video = {"type": "video", "video": str(tmp_path / "video.npy"), "fps": 0.02}
    options = ["data.max_images=4", "train.seq_len=96"]
    gemma, _ = record_type(tmp_path, "model=gemma4-tiny-vision", *options)
    (example,) = gemma.encode([{"messages": messages(video, TEXT)}])
    step = [301, *[306] * 3, 302]
    times = (b"00:00 ", b" 00:50 ", b" 01:40 ", b" 02:30 ")
    tokens = [256, *(id for time in times for id in (*time, *step)), ord("a"), ord("\n"), *b"ok"]
    row = gemma.row(example, 96)
    assert row["tokens"][: len(tokens)].tolist() == tokens
    assert row["images"][..., :2].max(axis=1).tolist() == [[2, 6]] * 4
    omni, _ = record_type(tmp_path, "model=qwen3-omni-tiny-media", *options)
    (example,) = omni.encode([{"messages": messages({**video, "fps": 1}, TEXT)}])
    tokens = [256, 302, *[301] * 6, 303, ord("a"), ord("\n"), *b"ok"]
    assert omni.row(example, 96)["tokens"][: len(tokens)].tolist() == tokens
    (rejected,) = omni.encode([{"messages": messages({**video, "use_audio_in_video": True}, TEXT)}])
    assert "needs model.vision.videos.use_audio_in_video=true" in rejected.reason


@pytest.mark.slow
def test_rows_have_the_audio_of_videos_between_their_steps(tmp_path: Path) -> None:
    """Two steps of 3 tokens, 26 positions apart, and 2.5 seconds of audio, which are 33 tokens."""
    options = [*HEARD, "train.seq_len=96", "data.max_clips=2"]
    options += ["data.max_images=4", "data.max_seconds=3", "data.loss_on=all"]
    made, _ = record_type(tmp_path, *options)
    pixels, samples = np.full((5, 8, 24, 3), 255, np.uint8), np.arange(40000, dtype=np.int16)[None] // 2
    heard, silent = {"bytes": matroska(pixels, 1, samples)}, {"bytes": matroska(pixels, 1)}
    long = {"bytes": matroska(pixels, 1, np.tile(samples, 2))}
    part, frames = {"type": "video"}, [302, *[301] * 6, 303]
    muted = {**part, "use_audio_in_video": False}
    (example,) = made.encode([{"messages": messages(part, TEXT, muted), "videos": [heard, heard]}])
    row = made.row(example, 96)
    ids = [302, 305, *[301] * 3, *[304] * 26, *[301] * 3, *[304] * 7, 306, 303]
    tokens = [256, *ids, ord("a"), *frames, ord("\n"), *b"ok", 257]
    assert row["tokens"][: len(tokens) - 1].tolist() == tokens[:-1]
    counted = row["targets"][row["weights"] > 0].tolist()
    assert counted == [id for id in tokens[1:] if id not in (301, 304)]
    assert row["audio"].shape == (2, 300, 16) and row["audio_lengths"].tolist() == [250, 0]
    extractor = make_extractor({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16})
    expected = extractor([samples[0].astype(np.float32) / 2**15]).features[0]
    np.testing.assert_allclose(row["audio"][0, :250], expected, atol=1e-6)
    (example,) = made.encode([{"messages": messages(part, TEXT), "videos": [silent]}])
    row = made.row(example, 96)
    assert row["tokens"][1:10].tolist() == [*frames, ord("a")] and row["audio_lengths"].tolist() == [0, 0]
    many, late = made.encode(
        [
            {"messages": messages(part, part, part), "videos": [heard] * 3},
            {"messages": messages(part), "videos": [long]},
        ]
    )
    assert "has 6 images" in many.reason and "audio track of more than 3 seconds" in late.reason
    (rejected,) = made.encode([{"messages": messages({**part, "use_audio_in_video": "no"}), "videos": [heard]}])
    assert rejected.reason == "video: use_audio_in_video='no' is not a boolean; accepted: true or false"
    few, _ = record_type(tmp_path, *options, "data.max_clips=1")
    (rejected,) = few.encode([{"messages": messages(part, part), "videos": [heard] * 2}])
    assert rejected.reason == "has 2 videos with audio, more than data.max_clips=1"


def test_rows_have_patches_of_images_of_different_sizes(tmp_path: Path) -> None:
    """Images of 1 x 2 and 3 x 1 tokens of 8 x 8 pixels; patches have rows and columns from 1, padding has zeros."""
    made, _ = record_type(tmp_path, "model=qwen3-vl-tiny")
    images = [np.zeros((7, 17, 3), np.uint8), np.full((25, 8, 3), 255, np.uint8)]
    (example,) = made.encode([{"messages": messages(IMAGE, TEXT, IMAGE), "images": images}])
    row = made.row(example, 48)
    tokens = [256, 302, 300, 300, 303, ord("a"), 302, 300, 300, 300, 303, ord("\n"), *b"ok", 257]
    assert row["tokens"][: len(tokens) - 1].tolist() == tokens[:-1]
    assert row["targets"][row["weights"] > 0].tolist() == [*b"ok", 257]
    assert row["images"].shape == (2, 24, 2 + 3 * 2 * 4 * 4)
    corners = [[1, 1], [1, 2], [2, 1], [2, 2]]
    wide, tall = row["images"][..., :2]
    assert wide[:9].tolist() == [*corners, *([row, column + 2] for row, column in corners), [0, 0]]
    assert tall[:13].tolist() == [*([row + 2 * i, column] for i in range(3) for row, column in corners), [0, 0]]
    assert row["images"][0, :8, 2:].max() == -1 and row["images"][1, :12, 2:].min() == 1


def test_images_are_scaled_to_the_largest_size_within_max_patches(tmp_path: Path) -> None:
    """24 patches of 4 x 4 pixels are 6 tokens of 8 x 8: 2 x 2 for 7 x 10 pixels, and one row for 8 x 90."""
    made, vision = record_type(tmp_path, "model=gemma4-tiny-vision")
    images = [np.zeros((7, 10, 3), np.uint8), np.full((8, 90, 3), 255, np.uint8)]
    (example,) = made.encode([{"messages": messages(IMAGE, TEXT, IMAGE), "images": images}])
    row = made.row(example, 48)
    small, wide = ([301, *[300] * count, 302] for count in (4, 6))
    assert row["tokens"][:16].tolist() == [256, *small, ord("a"), *wide]
    assert row["images"][..., :2].max(axis=1).tolist() == [[4, 4], [2, 12]]
    assert row["images"].shape == (2, *vision.image_shape)
    assert row["images"][0, :16, 2:].max() == -1 and row["images"][1, :, 2:].min() == 1


def test_loss_never_counts_tokens_of_images(tmp_path: Path) -> None:
    made, vision = record_type(tmp_path, "data.loss_on=all")
    (example,) = made.encode([{"messages": messages(TEXT, IMAGE), "images": [{"bytes": png((1, 2, 3))}]}])
    row = made.row(example, 48)
    counted = row["targets"][row["weights"] > 0]
    assert vision.placeholder_id in row["targets"] and vision.placeholder_id not in counted
    assert ord("a") in counted


def test_invalid_records(tmp_path: Path) -> None:
    made, _ = record_type(tmp_path)
    image = png((0, 0, 0))
    url = "data:image/png;base64," + base64.b64encode(image[:40]).decode()
    records = [
        ({"messages": messages(TEXT), "images": [image]}, "has 1 images, but 0 image parts"),
        ({"messages": messages(IMAGE, IMAGE), "images": [image]}, "has 1 images, but 2 image parts"),
        ({"messages": messages(*[IMAGE] * 3), "images": [image] * 3}, "more than data.max_images=2"),
        ({"messages": messages(IMAGE), "images": ["/nowhere.png"]}, "no such file"),
        ({"messages": messages(IMAGE), "images": [url]}, "not an image of a supported format"),
        ({"messages": messages(IMAGE), "images": [7]}, "accepted: a path, a data: URL"),
        ({"messages": messages(IMAGE)}, "has no column 'images'"),
        ({"messages": messages(IMAGE, answer="b" * 60), "images": [image]}, "more than train.seq_len=48"),
    ]
    for rejected, (_, reason) in zip(made.encode([record for record, _ in records]), records, strict=True):
        assert isinstance(rejected, Rejected) and reason in rejected.reason, (rejected, reason)


def test_a_file_of_records_becomes_rows(tmp_path: Path) -> None:
    """JSON Lines with data URLs, through the reader and the pipeline."""
    lines = []
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
        url = "data:image/png;base64," + base64.b64encode(png(colour)).decode()
        lines.append(json.dumps({"messages": messages(IMAGE, TEXT), "images": [url]}))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    config = compose([*COMMAND, f"data.path={tmp_path}/x.jsonl", "data.shuffle=false"]).config
    rows = Pipeline(config.data, RowSpec.of(config)).first_rows(2)
    assert [row["images"][0, 0, 0].tolist() for row in rows] == [[1, -1, -1], [-1, 1, -1]]
    assert [row["images"][1].any() for row in rows] == [False, False]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=gemma3-tiny"], "needs a model that takes images"),
        (["task=dpo"], "is not supported by task=dpo"),
        (["data.packing.method=concat_then_split"], "is not supported by data.record_type=image_chat"),
        (["mesh.stage=2"], "is not supported with images"),
        (["mesh.sequence=2"], "is not supported with images"),
        (["model=qwen3-vl-tiny", "model.vision.videos.use_audio_in_video=true"], "audio.num_layers=null: is needed"),
        (
            [
                "model=qwen3-omni-tiny-media",
                "model.vision.videos.use_audio_in_video=true",
                "data.packing.method=best_fit",
            ],
            "packing.method=best_fit: is not supported by data.record_type=image_chat",
        ),
    ],
)
def test_combinations_that_are_not_supported(overrides: list[str], reason: str) -> None:
    command = ["task=sft", "model=micro-vision", "data=shapes", "train.seq_len=48"]
    with pytest.raises(ConfigError, match=reason):
        compose([*command, *overrides])


def test_generated_images_show_their_answers() -> None:
    """Colours of pixels equal the expected response, and the number of separate shapes too."""
    checked = 0
    for index in range(60):
        record = make_record(index)
        (image,) = record["images"]
        is_shape = (image != image[0, -1]).any(axis=-1)
        colours = {name for name, value in COLOURS.items() if (image[is_shape] == value).all(axis=-1).any()}
        assert len(colours) == 1 and is_shape.any()
        if record["answer"] in COLOURS:
            assert colours == {record["answer"]}
            checked += 1
    assert checked > 10


def test_separators_of_images_equal_those_of_transformers(tmp_path: Path) -> None:
    """Line breaks of the separator merge with those of the text, as in a tokenizer with a token for each number."""
    transformers = import_optional("transformers", extra="parity")
    backend = import_optional("transformers.models.gemma3.image_processing_pil_gemma3", extra="parity")
    names = {"boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<image>"}
    breaks = ["\n" * count for count in range(1, 5)]
    vocabulary = {token: id for id, token in enumerate([*"abc: ", *breaks, *names.values()])}
    merges = [(breaks[n], "\n") for n in range(3)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.add_special_tokens(list(names.values()))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=names)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    processor = transformers.Gemma3Processor(
        backend.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), tokenizer, image_seq_length=4
    )
    vision = dataclasses.replace(
        model_option("gemma3-tiny-vision").vision,
        **{key: vocabulary[names[name]] for key, name in TOKENS.items()},
    )
    overrides = ["data.tokenizer.kind=hf", f"data.tokenizer.path={tmp_path / 'tokenizer'}"]
    tested = ImageTokenizer(load_tokenizer(compose(overrides).config.data), vision)
    for text in ("{}a", "a: {}\nb{}c", "a\n{}\n\n{}"):
        images = [Image.new("RGB", (9, 5))] * text.count("{}")
        expected = processor(text=text.replace("{}", "<begin>"), images=images)["input_ids"][0]
        found = tested.encode_with_special_tokens(text.replace("{}", MARKER))[0]
        found, _ = insert_images(found, read_images([np.asarray(image) for image in images], vision), vision)
        assert found.tolist() == list(expected), text
