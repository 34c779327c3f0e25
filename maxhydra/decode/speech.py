"""Speech of a response: the talker samples frames of codes with a KV cache, the vocoder turns them into a waveform.

The talker reads the user's turns and the beginning of the response at once; then, with each frame, one more token of
the response. Codes are sampled with the engine's sampler. B batch of one response, T positions, D residual stream of
the talker, G codebooks, V codes, F frames.
"""

import dataclasses
import wave
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.encoders import placeholders
from maxhydra.config.schema.tasks.inference import DecodeTask, SpeechOutput
from maxhydra.data.audio.tokens import Clips
from maxhydra.decode.request import Request
from maxhydra.decode.sampler import LogitControls, SamplingArrays, SamplingFeatures, sample
from maxhydra.layers import AudioClips, Context
from maxhydra.model import SPEECH, ModelDef
from maxhydra.sharding import Sharder

Tree = Any
# Tokens of the response before its text: the beginning of the turn, the role, and a line break.
HEADER = 3
# Lengths of compiled programs are multiples of these: of the talker's input, and of its cache.
INPUT_STEP, CACHE_STEP = 64, 512
# Sampling of the code predictor, as in transformers.
RESIDUAL_TOP_K, RESIDUAL_TOP_P = 50, 0.8
# Frames that the vocoder decodes at a time, and earlier frames that it reads again.
CHUNK_FRAMES, CONTEXT_FRAMES = 300, 25
SAMPLE_MAX, SAMPLE_BYTES = 2**15 - 1, 2


class Utterance(NamedTuple):
    """A prompt with its media, and the response to speak without the token that ends it."""

    prompt: Sequence[int]
    response: Sequence[int]
    images: np.ndarray | None = None
    """[images, *model.vision.image_shape]; None without images."""
    audio: Clips | None = None


class TalkerInputs(NamedTuple):
    """Inputs of the talker."""

    prompt_BTD: jax.Array
    """Inputs before the first frame."""
    text_FD: jax.Array
    """Added to the input of each frame, until the text ends."""
    pad_D: jax.Array
    """Added after that."""
    axis_positions: jax.Array | None
    """Positions of the prompt if RoPE has three axes; None: consecutive ones."""


class SpeechError(ValueError):
    """A response that cannot be spoken; the message says why."""


class Speaker:
    """Speaks responses of a model, one at a time, on one device."""

    def __init__(self, model: ModelDef, params: Tree, options: SpeechOutput):
        """`params`: embedding and speech; all weights of the model for prompts with images or audio."""
        assert model.speech is not None
        self._model, self._params, self._options, self._speech = model, params, options, model.speech
        self._section = model.config.speech

    def speak(self, utterance: Utterance, *, seed: int) -> np.ndarray:
        """Samples of the waveform, from -1 to 1, at vocoder.sampling_rate; none for an empty response."""
        if not utterance.response:
            return np.zeros(0, np.float32)
        frames = list(self.frames(self.inputs(utterance), seed=seed))
        return self.waveform(np.stack(frames)) if frames else np.zeros(0, np.float32)

    def inputs(self, utterance: Utterance) -> TalkerInputs:
        """The talker's inputs: turns of the user, the beginning of the response with special codes, then its text."""
        section, prompt = self._section, np.array(utterance.prompt)
        is_user, start = self._turns(prompt)
        embed = partial(self._programs.text, self._params)
        response = embed(np.array([*prompt[start:], *utterance.response]))
        begin_D, end_D, pad_D = embed(np.array([section.begin_id, section.end_id, section.pad_id]))
        codes = self._programs.codes(self._params, np.array(self._special_codes))
        text = [pad_D] * (len(codes) - 2) + [begin_D, response[HEADER]]
        turn = jnp.concatenate([response[:HEADER], jnp.stack(text) + codes])
        user_TD = self._user_inputs(utterance, prompt)[np.flatnonzero(is_user)]
        after = jnp.concatenate([response[HEADER + 1 :], end_D[None]])
        ids = np.array([*prompt[is_user], *[section.pad_id] * len(turn)])
        return TalkerInputs(
            jnp.concatenate([user_TD, turn])[None], after, pad_D, self._axis_positions(ids, utterance.images)
        )

    @property
    def _special_codes(self) -> list[int]:
        """Codes before the first frame."""
        talker = self._section.talker
        name = self._options.speaker or next(iter(talker.speakers))
        return [*talker.prompt_codes, talker.speakers[name], talker.pad_code, talker.begin_code]

    def _turns(self, prompt: np.ndarray) -> tuple[np.ndarray, int]:
        """Which tokens are of the user's turns, and the first token of the response's turn."""
        section, starts = self._section, np.flatnonzero(prompt[:-1] == self._section.turn_id)
        is_open = len(starts) > 0 and prompt[starts[-1] + 1] == section.assistant_id
        if not is_open or len(prompt) < starts[-1] + HEADER:
            ids = f"model.speech.turn_id={section.turn_id} and model.speech.assistant_id={section.assistant_id}"
            raise SpeechError(f"the prompt does not end with the beginning of a turn of the model: no {ids}")
        roles = prompt[starts + 1]
        turn = np.searchsorted(starts, np.arange(len(prompt)), side="right") - 1
        return (turn >= 0) & (roles[np.maximum(turn, 0)] == section.user_id), int(starts[-1])

    def _user_inputs(self, utterance: Utterance, prompt: np.ndarray) -> jax.Array:
        """[T, D] inputs for the tokens of the prompt: those of media from hidden states."""
        config = self._model.config
        text_TD = self._programs.text(self._params, prompt)
        is_media = np.isin(prompt, placeholders(config.vision, config.audio))
        if not is_media.any():
            return text_TD
        images = None if utterance.images is None else jnp.asarray(utterance.images)[None]
        clips = utterance.audio
        audio = None if clips is None else AudioClips(jnp.asarray(clips.frames)[None], jnp.asarray(clips.lengths)[None])
        hidden_TD = self._programs.hidden(self._params, prompt, images, audio)
        return jnp.where(is_media[:, None], hidden_TD, text_TD)

    def _axis_positions(self, ids: np.ndarray, images: np.ndarray | None) -> jax.Array | None:
        if images is None:
            return None
        positions = jnp.arange(len(ids))[None]
        return self._model.axis_positions(jnp.asarray(ids)[None], positions, jnp.asarray(images)[None])

    def frames(self, inputs: TalkerInputs, *, seed: int) -> Iterator[np.ndarray]:
        """Frames [G] of codes until the talker ends the speech, or until max_frames."""
        talker, options, T = self._section.talker, self._options, inputs.prompt_BTD.shape[1]
        if talker.context_length <= T:
            raise SpeechError(f"the prompt has {T} positions, but the talker has {talker.context_length}")
        limit = min(options.max_frames, talker.context_length - T)
        state = self._programs.prefill(
            self._params, self._pad_inputs(inputs), T, seed, _round_up(T + limit, CACHE_STEP)
        )
        for number in range(limit):
            if int(state.code_B[0]) == talker.end_code:
                return
            text_D = inputs.text_FD[number] if number < len(inputs.text_FD) else inputs.pad_D
            state, codes_BG = self._programs.frame(self._params, state, text_D, seed)
            codes_G = np.asarray(codes_BG[0])
            if codes_G.min() < 0:
                raise SpeechError(f"the logits of frame {number} are not finite; check the weights of model.speech")
            yield codes_G

    def _pad_inputs(self, inputs: TalkerInputs) -> tuple[jax.Array, jax.Array | None]:
        """Prompt and positions, padded to a compiled length."""
        T = inputs.prompt_BTD.shape[1]
        padding = [(0, 0), (0, _round_up(T, INPUT_STEP) - T), (0, 0)]
        axes = inputs.axis_positions
        return jnp.pad(inputs.prompt_BTD, padding), None if axes is None else jnp.pad(axes, padding)

    def waveform(self, codes_FG: np.ndarray, *, chunk: int = CHUNK_FRAMES, context: int = CONTEXT_FRAMES) -> np.ndarray:
        """Samples of frames of codes, decoded in chunks, each after the last frames of the chunk before."""
        parts = []
        for start in range(0, len(codes_FG), chunk):
            before = context if start > context else start
            samples = self._programs.waveform(self._params, codes_FG[None, start - before : start + chunk])
            parts.append(np.asarray(samples[0, before * self._speech.frame_samples :]))
        return np.concatenate(parts)

    @cached_property
    def _programs(self) -> "SpeechPrograms":
        return SpeechPrograms(self._model, self._options)


class TalkerState(NamedTuple):
    """State between two frames."""

    hidden_BD: jax.Array
    """Hidden state that gave the code."""
    code_B: jax.Array
    """Code of the first codebook."""
    position: jax.Array
    """Positions in the cache."""
    axis_position: jax.Array
    """The next position of RoPE."""
    number: jax.Array
    """Codes sampled from the talker."""
    seen_BV: jax.Array
    """uint16: 2 for codes that were sampled."""
    cache: Any


class SpeechPrograms:
    """Jitted functions of the weights."""

    def __init__(self, model: ModelDef, options: SpeechOutput):
        assert model.speech is not None
        self._model, self._speech, self._options = model, model.speech, options
        self._talker = model.config.speech.talker
        self.text: Callable[..., jax.Array] = jax.jit(self._text)
        self.hidden: Callable[..., jax.Array] = jax.jit(self._hidden)
        self.codes: Callable[..., jax.Array] = jax.jit(
            lambda params, codes_T: self._speech.embed_codes(params[SPEECH], codes_T[None])[0]
        )
        self.prefill: Callable[..., TalkerState] = jax.jit(self._prefill, static_argnums=4)
        self.frame: Callable[..., tuple[TalkerState, jax.Array]] = jax.jit(self._frame, donate_argnums=1)
        self.waveform: Callable[..., jax.Array] = jax.jit(
            lambda params, codes_BFG: self._speech.waveform(params[SPEECH], codes_BFG)
        )

    def _text(self, params: Tree, ids_T: jax.Array) -> jax.Array:
        """[T, D] projections of the embeddings of tokens."""
        embedded = self._model.embed(params, ids_T[None], _context(jnp.arange(len(ids_T))[None]))
        return self._speech.project_text(params[SPEECH], embedded)[0]

    def _hidden(self, params: Tree, ids_T: jax.Array, images: jax.Array | None, audio: AudioClips | None) -> jax.Array:
        """[T, D] projections of the residual stream of the model after talker.hidden_layer."""
        ctx = dataclasses.replace(_context(jnp.arange(len(ids_T))[None]), images=images, audio=audio)
        _, (stream_BTD,) = self._model.features(params, ids_T[None], ctx, [self._talker.hidden_layer - 1])
        return self._speech.project_hidden(params[SPEECH], stream_BTD)[0]

    def _prefill(
        self, params: Tree, inputs: tuple[jax.Array, jax.Array | None], length: jax.Array, seed: jax.Array, slots: int
    ) -> TalkerState:
        (x_BTD, axes), cache = inputs, self._speech.talker_cache(1, slots)
        positions_BT = jnp.arange(x_BTD.shape[1])[None]
        ctx = dataclasses.replace(
            _context(positions_BT),
            segments=(positions_BT < length).astype(jnp.int32),
            axis_positions=axes,
            cache=cache,
            is_fresh=True,
        )
        hidden_BTD, logits_BTV, cache = self._speech.talk(params[SPEECH], x_BTD, ctx)
        last = length - 1
        seen_BV = jnp.zeros((1, self._talker.vocab_size), jnp.uint16)
        next_axis = length if axes is None else jnp.max(axes[:, last]) + 1
        state = TalkerState(
            hidden_BTD[:, last], jnp.zeros(1, jnp.int32), length, next_axis, jnp.int32(0), seen_BV, cache
        )
        return self._sample_code(state, logits_BTV[:, last], seed)

    def _frame(
        self, params: Tree, state: TalkerState, text_D: jax.Array, seed: jax.Array
    ) -> tuple[TalkerState, jax.Array]:
        """The codes of a frame, and the state with the first code of the next one."""
        codebooks = self._model.config.speech.codebooks
        assert codebooks is not None

        def choose(logits_BV: jax.Array, codebook: jax.Array) -> jax.Array:
            sampling = self._sampling(seed, (state.number - 1) * codebooks + codebook, is_residual=True)
            return sample(logits_BV, LogitControls(), sampling, self._features).token_B

        codes_BG, sum_BD = self._speech.predict_frame(params[SPEECH], state.hidden_BD, state.code_B, choose)
        ctx = dataclasses.replace(
            _context(state.position[None, None]),
            axis_positions=jnp.broadcast_to(state.axis_position, (1, 1, 3)),
            cache=state.cache,
        )
        hidden_BTD, logits_BTV, cache = self._speech.talk(params[SPEECH], (sum_BD + text_D)[:, None], ctx)
        state = state._replace(
            hidden_BD=hidden_BTD[:, 0], position=state.position + 1, axis_position=state.axis_position + 1, cache=cache
        )
        return self._sample_code(state, logits_BTV[:, 0], seed), codes_BG

    def _sample_code(self, state: TalkerState, logits_BV: jax.Array, seed: jax.Array) -> TalkerState:
        """The state with a code sampled from the talker's logits."""
        talker, codebooks = self._talker, self._model.config.speech.codebooks
        assert codebooks is not None
        codes_V = jnp.arange(talker.vocab_size)
        is_allowed_V = (codes_V < talker.vocab_size - talker.special_codes) | (codes_V == talker.end_code)
        controls = LogitControls(usage_BV=state.seen_BV)
        sampling = self._sampling(seed, state.number * codebooks, is_residual=False)
        logits_BV = jnp.where(is_allowed_V, logits_BV, -jnp.inf)
        code_B = sample(logits_BV, controls, sampling, self._features).token_B
        seen_BV = state.seen_BV.at[jnp.arange(1), code_B].set(2)
        return state._replace(code_B=code_B, number=state.number + 1, seen_BV=seen_BV)

    @property
    def _features(self) -> SamplingFeatures:
        is_random = self._options.temperature > 0
        return SamplingFeatures(random=is_random, filters=is_random, penalties=True, logprobs=False)

    def _sampling(self, seed: jax.Array, position: jax.Array, *, is_residual: bool) -> SamplingArrays:
        """Sampling parameters of one row; the code predictor's are fixed, but greedy if the talker's are."""
        options = self._options
        if is_residual:
            values = (float(options.temperature > 0), RESIDUAL_TOP_K, RESIDUAL_TOP_P, 1.0)
        else:
            values = (options.temperature, options.top_k, options.top_p, options.repetition_penalty)
        temperature, top_k, top_p, penalty = values

        def row(value: float) -> jax.Array:
            return jnp.full(1, value, jnp.float32)

        return SamplingArrays(
            temperature_B=row(temperature),
            top_k_B=jnp.full(1, top_k, jnp.int32),
            top_p_B=row(top_p),
            min_p_B=row(0),
            penalty_B=row(penalty),
            frequency_B=row(0),
            presence_B=row(0),
            seed_B2=jnp.stack([jnp.zeros((), jnp.uint32), jnp.asarray(seed).astype(jnp.uint32)])[None],
            position_B=jnp.broadcast_to(position, 1),
            num_bias_B=jnp.zeros(1, jnp.int32),
        )


def _context(positions_BT: jax.Array) -> Context:
    return Context(positions=positions_BT, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step


class SpeechFiles:
    """Writes speech into a folder, one file for each completion of a prompt."""

    def __init__(self, speaker: Speaker, folder: Path, *, rate: int, eos: frozenset[int]):
        self._speaker, self._folder, self._rate, self._eos = speaker, folder, rate, eos

    @classmethod
    def open(cls, task: DecodeTask, model: ModelDef, params: Tree, *, eos: frozenset[int]) -> "SpeechFiles":
        """Speech of task.prompt. Without images and audio only embedding and speech of the weights are kept."""
        assert task.speech.folder is not None
        if not (task.visual_media or task.audios):
            params = {name: params[name] for name in ("embedding", SPEECH)}
        rate = model.config.speech.vocoder.sampling_rate
        return cls(Speaker(model, params, task.speech), Path(task.speech.folder).expanduser(), rate=rate, eos=eos)

    def write(self, number: int, request: Request, tokens: Sequence[int]) -> None:
        """Speak the tokens of a completion without the one that ends it."""
        response = tokens[:-1] if tokens and tokens[-1] in self._eos else tokens
        utterance = Utterance(request.prompt, response, request.images, request.audio)
        samples = self._speaker.speak(utterance, seed=request.seed)
        write_wav(self._folder / f"{number}.wav", samples, rate=self._rate)


def check_speech(task: DecodeTask) -> None:
    """Create the folder of task.speech; ConfigError if that fails, or on several devices."""
    if (folder := task.speech.folder) is None:
        return
    if (count := jax.device_count()) > 1:
        hint = "make only one device visible, for example with CUDA_VISIBLE_DEVICES=0"
        raise ConfigError(Problem("task.speech.folder", f"is not supported on {count} devices", folder, "null", hint))
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created: {error.strerror}"
        raise ConfigError(Problem("task.speech.folder", reason, value=folder, accepted="a folder")) from None


def write_wav(path: Path, samples: np.ndarray, *, rate: int) -> None:
    """Write samples from -1 to 1 as 16-bit mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(SAMPLE_BYTES)
        file.setframerate(rate)
        file.writeframes(np.round(samples * SAMPLE_MAX).astype("<i2").tobytes())
