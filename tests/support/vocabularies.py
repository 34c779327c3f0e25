"""Small tokenizers of every kind, trained on the fly."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from maxhydra.data.sources.demo import TEXT
from tests.support.skips import import_optional

TEMPLATES = Path(__file__).parent / "templates"

# bos, eos, end of turn and other special tokens of each family.
MARKS = {
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "chatml": ("<|endoftext|>", "<|im_end|>", "<|im_end|>", "<|im_start|>"),
    "gemma": ("<bos>", "<eos>", "<end_of_turn>", "<start_of_turn>"),
    "mistral": ("<s>", "</s>", "</s>"),
}


def lines() -> list[str]:
    text = TEXT.read_text(encoding="utf-8")[:60_000]
    return [*text.splitlines(), "user assistant system model\n", "naïve café 日本語 🎭 user\nassistant\n"] * 2


def template(family: str, *, marked: bool) -> str:
    """Chat template of a family, with or without generation blocks."""
    text = (TEMPLATES / f"{family}.jinja").read_text()
    return text if marked else text.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def byte_level(marks: Sequence[str], vocab_size: int = 600) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # As in many published tokenizers: spaces trimmed from the offsets, and a bos token added.
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{marks[0]} $A", special_tokens=[(marks[0], 0)]),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(marks), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines(), trainer)
    return made


def metaspace(marks: Sequence[str], *, unigram: bool = False, vocab_size: int = 600) -> Tokenizer:
    """BPE or unigram model with spaces as part of words, as converted from SentencePiece."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    if unigram:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=["<unk>", *marks], unk_token="<unk>", show_progress=False
        )
        made.train_from_iterator(lines(), trainer)
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Replace(" ", "▁")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=["<unk>", *marks, *bytes_of], show_progress=False
        )
        made.train_from_iterator((word for line in lines() for word in line.replace(" ", " ▁").split(" ")), trainer)
        # Byte tokens are not special: the trainer only lists them as such to include them in the vocabulary.
        description = json.loads(made.to_str())
        description["added_tokens"] = [
            token for token in description["added_tokens"] if token["content"] not in bytes_of
        ]
        made = Tokenizer.from_str(json.dumps(description))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def save(made: Tokenizer, folder: Path, **settings: object) -> Path:
    """Save a tokenizer as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def family_folder(family: str, folder: Path, *, marked: bool = False) -> Path:
    """Write a tokenizer like a family's, with its template. Its padding token is its end token."""
    marks = list(dict.fromkeys(MARKS[family]))
    made = metaspace(marks) if family in ("gemma", "mistral") else byte_level(marks)
    begin = {} if family == "chatml" else {"bos_token": marks[0]}
    end = MARKS[family][1]
    return save(made, folder, **begin, eos_token=end, pad_token=end, chat_template=template(family, marked=marked))


def with_token(folder: Path, text: str) -> Path:
    """Add a plain text token, for example one that spans a boundary."""
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens([AddedToken(text, special=False, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    return folder


def sentencepiece_file(path: Path, **options: object) -> Path:
    sentencepiece = import_optional("sentencepiece", extra="data")
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines() if line),
        model_writer=content,
        **{
            "vocab_size": 700,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
            **options,
        },
    )
    path.write_bytes(content.getvalue())
    return path


def tiktoken_file(path: Path, merges: Sequence[bytes], **settings: object) -> Path:
    """Write a .tiktoken file: all bytes, then merges in order of rank."""
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    if settings:
        path.with_name(f"{path.name}.json").write_text(json.dumps(settings))
    return path
