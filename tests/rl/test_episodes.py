"""Episodes with tools: token ids and hand-labelled loss mask of five turns, for every template that ships."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import Environment, EnvironmentKind
from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.data.tool_calls import FORMATS, format_of, parse_turn
from maxhydra.decode.request import Completion, Handle, Request, TokenLogprob
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.rl.environment_pool import EnvironmentPool
from maxhydra.rl.episodes import Episode, EpisodeRunner, TurnEncoder
from maxhydra.rl.reward_pool import RewardResult
from maxhydra.rl.rollout import Group, columns, unfiltered_sampling
from tests.support.vocabularies import byte_level, save

SPECIALS = [
    *("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    *("<|im_start|>", "<|im_end|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
SUMS = {"1+2": "3", "3*4": "12", "12-20": "-8", "2**8": "256"}
# By template: bos and eos token, then text of the model (a call; the answer) and of the environment (its reply to a
# call, with the header of the next turn). {e} is the expression, {r} its value.
HAND_LABELLED = {
    "llama3": (
        *("<|begin_of_text|>", "<|eot_id|>"),
        '{{"name": "calculator", "parameters": {{"expression": "{e}"}}}}<|eot_id|>',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"{r}"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "All done.<|eot_id|>",
    ),
    "qwen3": (
        *("<|im_end|>", "<|im_end|>"),
        '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{e}"}}}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\n{r}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "All done.<|im_end|>",
    ),
    "gemma3": (
        *("<bos>", "<end_of_turn>"),
        '```tool_code\ncalculator(expression="{e}")\n```<end_of_turn>',
        "\n<start_of_turn>user\n```tool_output\n{r}\n```<end_of_turn>\n<start_of_turn>model\n",
        "All done.<end_of_turn>",
    ),
    "mistral": (
        *("<s>", "</s>"),
        '[TOOL_CALLS] [{{"name": "calculator", "arguments": {{"expression": "{e}"}}, "id": "call00000"}}]</s>',
        '[TOOL_RESULTS] {{"content": "{r}", "call_id": "call00000"}}[/TOOL_RESULTS]',
        " All done.</s>",
    ),
    "gpt-oss": (
        *("<|return|>", "<|return|>"),
        ' to=functions.calculator<|channel|>commentary json<|message|>{{"expression": "{e}"}}<|call|>',
        '<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"{r}"<|end|><|start|>assistant',
        "<|channel|>final<|message|>All done.<|return|>",
    ),
    "deepseek3": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n"
        '```json\n{{"expression": "{e}"}}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{r}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "All done.<｜end▁of▁sentence｜>",
    ),
}


class ScriptedEngine:
    """Samples given token ids, whatever the prompt is."""

    def __init__(self, turns: list[list[int]]):
        self.turns, self.requests = iter(turns), []

    def submit_all(self, requests: list[Request]) -> list[Handle]:
        return [self.submit(request) for request in requests]

    def submit(self, request: Request) -> Any:
        self.requests.append(request)
        tokens = tuple(next(self.turns)[: request.max_tokens])
        logprobs = tuple(TokenLogprob(token, -0.5 - index, ()) for index, token in enumerate(tokens))

        class Done:
            def result(self) -> Completion:
                finish = "length" if len(tokens) == request.max_tokens else "stop"
                return Completion("", tokens, logprobs, finish)

        return Done()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(SPECIALS), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tools() -> Iterator[tuple[Environment, EnvironmentPool]]:
    config = Environment(kind=EnvironmentKind.tools, tools=["calculator"])
    pool = EnvironmentPool(config)
    yield config, pool
    pool.close()


def encoder_of(folder: Path, template: str, bos: str, eos: str) -> PromptEncoder:
    tokenizer = {"kind": "hf", "path": folder, "bos": bos, "eos": eos, "chat_template": template}
    data = compose([f"data.tokenizer.{key}='{value}'" for key, value in tokenizer.items()]).config.data
    return PromptEncoder(data, vocab_size=1000)


@pytest.mark.parametrize("template", HAND_LABELLED)
def test_five_turns_have_loss_on_the_models_tokens_only(
    template: str, folder: Path, tools: tuple[Environment, EnvironmentPool]
) -> None:
    bos, eos, call, reply, answer = HAND_LABELLED[template]
    prompts = encoder_of(folder, template, bos, eos)
    config, pool = tools

    def ids(text: str) -> list[int]:
        return prompts.tokenizer.encode_with_special_tokens(text)[0].tolist()

    labelled = []
    for expression, value in SUMS.items():
        labelled += [(call.format(e=expression), True), (reply.format(r=value), False)]
    labelled.append((answer, True))
    engine = ScriptedEngine([ids(text) for text, is_sampled in labelled if is_sampled])
    runner = EpisodeRunner(pool, TurnEncoder(prompts), config, 1500, 1500, seed=0, is_deterministic=True)
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    (episode,) = runner.run(engine, [((1,), {"prompt": question})], unfiltered_sampling(1500, 1.0), samples=1, number=0)

    expected = [(token, is_sampled) for text, is_sampled in labelled for token in ids(text)]
    assert list(zip(episode.tokens, episode.is_sampled, strict=True)) == expected
    assert episode.transcript == "".join(text for text, _ in labelled)
    assert (episode.finish, episode.text, episode.num_turns, episode.num_tool_calls) == ("stop", "All done.", 5, 4)
    # Every turn continues the ids of the ones before.
    assert all(
        request.prompt == (*episode.prompt, *episode.tokens[: len(request.prompt) - len(episode.prompt)])
        for request in engine.requests
    )
    # The whole conversation, rendered by the template at once, is the same text.
    messages = [*question, *episode.turns]
    whole = prompts.template.prompt(messages, tools=tools_of(episode, pool, config), add_generation_prompt=False)
    assert prompts.template.prompt(
        question, tools=tools_of(episode, pool, config)
    ) + episode.transcript == whole.rstrip("\n")

    arrays = columns([Group([episode], [RewardResult({}, 1.0, True, 0)])], task(), 1600)
    start = len(episode.prompt) - 1
    mask = arrays["weights"][0, start : start + len(expected)]
    assert mask.tolist() == [float(is_sampled) for _, is_sampled in expected]
    assert arrays["weights"].sum() == mask.sum()
    assert arrays["targets"][0, start : start + len(expected)].tolist() == [token for token, _ in expected]
    assert (arrays["sampled_logprobs"][0, start : start + len(expected)] < 0).tolist() == (mask > 0).tolist()


def task() -> GrpoTask:
    return GrpoTask(name="grpo", mask_degenerate=False)


def tools_of(episode: Episode, pool: EnvironmentPool, config: Environment) -> Any:
    reply = pool.reset(0, {"prompt": [{"role": "user", "content": "a"}]}).result()
    return reply["tools"]


@pytest.mark.slow
def test_limits_end_episodes_and_a_cut_turn_is_ended_without_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.syspath_prepend(request.path.parents[1] / "support")
    function = "environment_functions:Faulty"
    config = Environment(kind=EnvironmentKind.function, function=function, turn_tokens=6, max_turns=2)
    prompts = encoder_of(folder, "qwen3", "<|im_end|>", "<|im_end|>")
    encoder = TurnEncoder(prompts)

    def play(*turns: str, max_tokens: int = 200) -> Episode:
        scripted = [prompts.tokenizer.encode_with_special_tokens(text)[0].tolist() for text in turns]
        runner = EpisodeRunner(pool, encoder, config, max_tokens, 200, seed=0, is_deterministic=len(turns) > 1)
        known = [((1,), {"prompt": [], "answer": "x"})]
        sampling = unfiltered_sampling(max_tokens, 1.0)
        return runner.run(ScriptedEngine(scripted), known, sampling, samples=1, number=0)[0]

    with closing(EnvironmentPool(config)) as pool:
        episode = play("0123456", "ae<|im_end|>")
        end = prompts.tokenizer.special_token_ids["<|im_end|>"]
        assert episode.tokens[6] == end and episode.is_sampled[:7] == [True] * 6 + [False]
        assert episode.transcript == (
            "012345<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\nae<|im_end|>"
        )
        assert (episode.finish, episode.reward, len(episode.turns)) == ("turns", 2, 4)
        stopped, long = play("b stop<|im_end|>"), play("ae<|im_end|>", max_tokens=12)
        assert (stopped.finish, stopped.reward, stopped.is_sampled) == ("stop", 1, [True] * 5)
        assert (long.finish, long.reward, long.is_sampled) == ("length", 2, [True] * 3), "the reply does not fit"
        short = play("ab", max_tokens=2)
        assert (short.finish, short.num_sampled, short.failure) == ("length", 2, None)
        special = play("special")
        assert special.finish == "invalid" and "special token <|end|>" in (special.failure or "")


CALLS = {
    "hermes": '<tool_call>{{"name": "{n}", "arguments": {a}}}</tool_call>',
    "json": '<|python_tag|>{{"name": "{n}", "parameters": {a}}}',
    "bracket": '[TOOL_CALLS][{{"name": "{n}", "arguments": {a}}}]',
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.{n} "
    "<|constrain|>json<|message|>{a}",
    "token": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "python": "```tool_code\nprint({n}(x={v}))\n```",
}


@pytest.mark.parametrize("format", CALLS)
def test_calls_are_parsed_and_invalid_ones_reported(format: str) -> None:
    text = CALLS[format].format(n="f", a='{"x": [1, "}"]}', v='[1, "}"]')
    message = parse_turn(text, format)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": {"x": [1, "}"]}}]
    assert message["content"] == "" and "invalid_tool_calls" not in message
    invalid = parse_turn(CALLS[format].format(n="f", a='{"x": ', v="g("), format)
    assert "tool_calls" not in invalid and len(invalid["invalid_tool_calls"]) == 1
    assert parse_turn("Just { text.", format) == {"role": "assistant", "content": "Just { text."} or format == "harmony"


def test_formats_are_found_in_templates() -> None:
    folder = Path(parse_turn.__globals__["__file__"]).parent / "templates"
    found = {path.stem: format_of(path.read_text()) for path in folder.glob("*.jinja")}
    assert found == {
        "llama3": "json",
        "qwen3": "hermes",
        "gemma3": "python",
        "mistral": "bracket",
        "gpt-oss": "harmony",
        "deepseek3": "token",
        "lines": "hermes",
        "lines_tools": "hermes",
    }
    assert set(found.values()) == set(FORMATS)
