"""The settings of a prompt encoder, with which other processes of the server encode prompts exactly as it does."""

import dataclasses
import hashlib
from typing import Any

from maxhydra.config import ConfigError
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.vision import Vision
from maxhydra.data.tokenizers import input_files, template_files
from maxhydra.decode.sampling_params import PromptEncoder


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """The arguments of a prompt encoder, and a check that its files are the same."""

    data: Data
    vocab_size: int
    vision: Vision | None
    audio: Audio | None
    files: str
    """Digest of the tokenizer's files when the server read them."""

    @classmethod
    def of(cls, prompts: PromptEncoder) -> "EncoderSettings":
        return cls(prompts.data, prompts.vocab_size, prompts.vision, prompts.audio, _files_digest(prompts.data))

    def load(self) -> tuple[PromptEncoder | None, str]:
        """Return the encoder, or None and the reason why it cannot be loaded."""
        try:
            media: dict[str, Any] = {"vision": self.vision, "audio": self.audio}
            encoder = PromptEncoder(self.data, vocab_size=self.vocab_size, **media)
            if encoder.has_template:
                _ = encoder.template
            is_same = _files_digest(self.data) == self.files
        except (ConfigError, OSError) as error:
            return None, f"the tokenizer cannot be loaded again: {error}"
        if not is_same:
            return None, "the tokenizer's files have changed since the server started: restart it"
        return encoder, ""


def _files_digest(data: Data) -> str:
    digest = hashlib.sha256()
    for path in [*input_files(data.tokenizer), *template_files(data.tokenizer)]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
