"""Which requests with audio an engine can serve."""

import dataclasses

from maxhydra.config.schema.model import Model
from maxhydra.decode.request import Request


@dataclasses.dataclass(frozen=True)
class AudioLimits:
    """Requests with audio are prefilled in one call."""

    model: Model
    prefill_chunk: int

    def find_problem(self, request: Request) -> str | None:
        """Return why a request cannot be served; None if it can."""
        section, audio = self.model.audio, request.audio
        if section.num_layers is None:
            return None if audio is None else "the model takes no audio: choose one with model.audio"
        lengths = [] if audio is None else audio.lengths.tolist()
        expected, num_tokens = sum(map(section.num_tokens, lengths)), request.prompt.count(section.placeholder_id or 0)
        if num_tokens != expected:
            return f"the prompt has {num_tokens} audio tokens, but {len(lengths)} clips, which have {expected}"
        if audio is None:
            return None
        if audio.frames.ndim != 3 or audio.frames.shape[2] != section.num_bands:
            return f"audio has shape {audio.frames.shape}, expected [clips, frames, {section.num_bands}]"
        if len(request.prompt) <= self.prefill_chunk:
            return None
        return (
            f"the prompt with audio has {len(request.prompt)} tokens, more than one prefill call of "
            f"{self.prefill_chunk}: shorten it, or raise task.engine.prefill_chunk"
        )
