"""Requests with different adapters share one engine, and each gets the tokens of its own merged model."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Pooling, Sampling, Speculation, SpeculationMethod
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.convert.hf import hf_source
from maxhydra.convert.load import load_weights
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode import draft_policy
from maxhydra.decode.adapters import AdapterLimits, AdapterReader, AdapterTable
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server import AdapterRoutes, ServerDefaults
from maxhydra.decode.request import AdapterError, Completion, Request, UnknownAdapterError
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.running_server import RunningServer
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")
peft = import_optional("peft", extra="parity")
openai = import_optional("openai", extra="test")

pytestmark = pytest.mark.parity

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "llama"
KEY = "task.adapters"
LIMITS = AdapterLimits(slots=8, rank=8, targets=("attention/", "mlp/"))
# Ranks and modules of eight adapters.
ADAPTERS = {
    "one": (8, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "two": (4, ["q_proj", "v_proj"]),
    "three": (2, ["o_proj", "down_proj"]),
    "four": (1, ["up_proj"]),
    "five": (8, ["k_proj", "o_proj"]),
    "six": (3, ["gate_proj", "up_proj", "down_proj"]),
    "seven": (5, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "eight": (8, ["v_proj"]),
}
NGRAM = {"method": SpeculationMethod.ngram, "tokens": 3, "max_ngram": 2, "min_ngram": 1}
PROMPTS = [[1, 5, 9, 2, 6], [3, 3, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41], [2, 4]]


def base_model() -> object:
    return transformers.AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters with random weights, written by PEFT."""
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    for number, (name, (rank, modules)) in enumerate(ADAPTERS.items()):
        settings = peft.LoraConfig(
            r=rank, lora_alpha=4 + number, target_modules=modules, init_lora_weights=False, use_rslora=number % 2 == 1
        )
        adapted = peft.get_peft_model(base_model(), settings)
        with torch.no_grad():
            for weight_name, weight in adapted.named_parameters():
                if "lora_" in weight_name:
                    weight.normal_(0, 0.3)
        adapted.save_pretrained(root / name)
    return {name: root / name for name in ADAPTERS}


@pytest.fixture(scope="module")
def model() -> ModelDef:
    described = hf_source(KEY, str(GOLDEN), GOLDEN).model
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    return build(config.Model(**{**vars(described), "dtypes": dtypes}))


def start(model: ModelDef, folders: dict[str, Path], mesh: Mesh, *, devices: int = 1, **changes: Any) -> Engine:
    sharder = Sharder(build_mesh(mesh, jax.devices()[:devices]), RULES)
    weights = load_weights(str(GOLDEN), model, shardings=sharder.tree(model.axes), dtype="float32")
    settings = EngineConfig(max_batch=16, cache_tokens=2048, page_size=4, max_context=64, **changes)
    made = Engine(model, weights, ByteTokenizer(), settings, sharder=sharder, eos=(), adapters=LIMITS)
    reader = AdapterReader(model, LIMITS)
    for name, folder in folders.items():
        made.load_adapter(name, str(folder), reader.read(KEY, str(folder)))
    return made


@pytest.fixture(scope="module")
def engine(model: ModelDef, folders: dict[str, Path]) -> Iterator[Engine]:
    made = start(model, folders, Mesh())
    yield made
    made.close()


def make_request(prompt: list[int], adapter: str | None, max_tokens: int = 8) -> Request:
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    return Request(
        tuple(prompt), max_tokens, **sampling, stop=(), ignore_eos=True, logprobs=0, stream=False, adapter=adapter
    )


@functools.cache
def merged(folder: Path | None) -> object:
    """The base model of transformers with an adapter merged into its weights by PEFT."""
    base = base_model()
    return base if folder is None else peft.PeftModel.from_pretrained(base, folder).merge_and_unload()


def check(reference: object, prompt: list[int], completion: Completion) -> None:
    """Each token is the most likely one of the reference, with its log-probability."""
    assert completion.finish == "length", completion.error
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *completion.tokens]])).logits[0].double()
    expected = torch.log_softmax(logits, -1).numpy()[len(prompt) - 1 : -1]
    assert list(completion.tokens) == expected.argmax(-1).tolist()
    found = [entry.logprob for entry in completion.logprobs]
    np.testing.assert_allclose(found, expected.max(-1), atol=2e-4)


@pytest.mark.slow
@pytest.mark.default_cases("12 tokens")
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
def test_eight_adapters_in_one_batch_equal_their_merged_models(
    prompt: list[int], engine: Engine, folders: dict[str, Path]
) -> None:
    names: list[str | None] = [None, *ADAPTERS]
    handles = engine.submit_all(make_request(prompt, name) for name in names)
    completions = {name: handle.result() for name, handle in zip(names, handles, strict=True)}
    assert len({completion.tokens for completion in completions.values()}) > 4, "the adapters have no effect"
    for name, completion in completions.items():
        check(merged(folders.get(name or "")), prompt, completion)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_adapters_on_a_mesh_equal_their_merged_models(model: ModelDef, folders: dict[str, Path], axis: str) -> None:
    names: list[str | None] = [None, "one", "two", "six"]
    loaded = {name: folders[name] for name in names if name is not None}
    made = start(model, loaded, Mesh(**{axis: 2}), devices=2)
    try:
        handles = made.submit_all(make_request(PROMPTS[1], name) for name in names)
        for name, handle in zip(names, handles, strict=True):
            check(merged(None if name is None else folders[name]), PROMPTS[1], handle.result())
        # Embeddings are those of the model without an adapter.
        (vector,) = made.pool(PROMPTS[:1], Pooling.last)
        with torch.no_grad():
            (hidden,) = merged(None).model(torch.tensor(PROMPTS[:1])).last_hidden_state[:, -1]
        np.testing.assert_allclose(vector, (hidden / hidden.norm()).numpy(), atol=1e-4)
    finally:
        made.close()


@pytest.mark.exhaustive
def test_speculative_decoding_with_adapters_equals_their_merged_models(
    model: ModelDef, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All steps verify drafts, whatever they gain.
    monkeypatch.setattr(draft_policy, "MARGIN", 0.0)
    names: list[str | None] = [None, "one", "two"]
    loaded, speculation = {name: folders[name] for name in names if name is not None}, Speculation(**NGRAM)
    made = start(model, loaded, Mesh(), burst=4, deterministic=True, speculation=speculation)
    try:
        handles = made.submit_all(make_request(PROMPTS[1], name, 40) for name in names)
        for name, handle in zip(names, handles, strict=True):
            check(merged(None if name is None else folders[name]), PROMPTS[1], handle.result())
        assert made.stats()["tokens_accepted"] > 0
    finally:
        made.close()


@pytest.mark.exhaustive
def test_the_prefix_cache_separates_adapters(engine: Engine, folders: dict[str, Path]) -> None:
    """The same prompt again, with cached pages of its own adapter only."""
    prompt = [7, 1, 7, 2, 7, 3, 7, 4, 7, 5, 7, 6]
    for name in ("one", None, "two", "one", "two", None):
        before = engine.stats()["prompt_tokens_read"]
        completion = engine.submit(make_request(prompt, name)).result()
        read = engine.stats()["prompt_tokens_read"] - before
        check(merged(folders.get(name or "")), prompt, completion)
        assert read in (len(prompt), len(prompt) - 8)
    assert read == len(prompt) - 8, "the second request of an adapter reads its cached pages"


@pytest.mark.exhaustive
def test_adapters_are_loaded_and_unloaded_under_load(engine: Engine, model: ModelDef, folders: dict[str, Path]) -> None:
    """No request is lost or gets another adapter's tokens while a slot changes, and a load compiles nothing."""
    reader, prompt = AdapterReader(model, LIMITS), PROMPTS[0]
    expected = {name: engine.submit(make_request(prompt, name, 24)).result().tokens for name in (*ADAPTERS, None)}
    weights = reader.read(KEY, str(folders["eight"]))
    engine.unload_adapter("eight")

    def send(name: str | None) -> None:
        assert engine.submit(make_request(prompt, name, 24)).result().tokens == expected[name]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(send, name) for name in [*list(ADAPTERS)[:-1], None] * 6]
        for number in range(6):
            engine.load_adapter(f"again {number}", str(folders["eight"]), weights)
            # Unloaded while it runs: the request finishes with its adapter.
            handle = engine.submit(make_request(prompt, f"again {number}", 24))
            engine.unload_adapter(f"again {number}")
            with pytest.raises(UnknownAdapterError, match="loaded adapters: one, two"):
                engine.submit(make_request(prompt, f"again {number}"))
            with pytest.raises(AdapterError, match="no slot is free: 7 of 8 slots have an adapter, and running"):
                engine.load_adapter("another", "", weights)
            assert handle.result().tokens == expected["eight"]
        for future in futures:
            future.result()
    send("one")
    compiled = engine.wait_for_compiles(), engine.stats()["programs_compiled"]
    engine.load_adapter("eight", str(folders["eight"]), weights)
    send("eight")
    assert (engine.wait_for_compiles(), engine.stats()["programs_compiled"]) == compiled


class Server(RunningServer):
    """A server over an engine that another fixture closes."""

    def __init__(self, engine: Engine, read: Callable[[str], object], processes: int):
        defaults = ServerDefaults("base", Sampling(max_tokens=8, ignore_eos=True), 8, 64, 64, has_adapters=True)
        routes = AdapterRoutes(engine, read, model="base", is_live=True)
        prompts = PromptEncoder(Data(), vocab_size=264)
        super().__init__(engine, prompts, processes=processes, adapters=routes, defaults=defaults)

    def change(self, path: str, **fields: str) -> tuple[int, dict[str, Any]]:
        return self.post(fields, path)


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.exhaustive)])
def server(engine: Engine, model: ModelDef, request: pytest.FixtureRequest) -> Iterator[Server]:
    running = Server(engine, functools.partial(AdapterReader(model, LIMITS).read, "lora_path"), request.param)
    yield running
    running.end(closes_engine=False)


def test_the_model_of_a_request_names_an_adapter(server: Server, folders: dict[str, Path]) -> None:
    """With the client of OpenAI; adapters are in the list of models, and an unknown one is reported with all names."""
    client = server.client()
    names = [card.id for card in client.models.list()]
    assert names == ["base", *ADAPTERS] and client.models.retrieve("two").parent == "base"
    prompt = PROMPTS[1]
    for name in ("base", "one", "five"):
        answer = client.completions.create(model=name, prompt=prompt, logprobs=0, max_tokens=4)
        with torch.no_grad():
            logits = merged(folders.get(name))(torch.tensor([prompt])).logits[0, -1]
        assert answer.model == name
        expected = torch.log_softmax(logits.double(), -1).max().item()
        assert answer.choices[0].logprobs.token_logprobs[0] == pytest.approx(expected, abs=2e-4)
    with pytest.raises(openai.NotFoundError, match="'absent' is not available; accepted: 'base', 'one', 'two'"):
        client.completions.create(model="absent", prompt=prompt)
    with pytest.raises(openai.NotFoundError, match="'absent' is not available"):
        client.models.retrieve("absent")


@pytest.mark.slow
def test_clients_load_and_unload_adapters(server: Server, folders: dict[str, Path], tmp_path: Path) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert server.change(load, lora_name="one", lora_path=str(folders["one"]))[0] == 400, "the name is taken"
    assert server.change(unload, lora_name="eight")[0] == 200
    status, answer = server.change(unload, lora_name="eight")
    assert status == 404 and "'eight' is not available; accepted: 'base', 'one'" in answer["error"]["message"]
    status, answer = server.change(load, lora_name="eight", lora_path=str(tmp_path / "absent"))
    assert status == 400 and "does not exist" in answer["error"]["message"]
    assert server.change(load, lora_name="base", lora_path=str(folders["eight"]))[0] == 400
    assert server.change(load, lora_name="eight")[0] == 400
    assert server.change(load, lora_name="eight", lora_path=str(folders["eight"]))[0] == 200


@pytest.mark.slow
def test_unsuitable_adapters_are_rejected(model: ModelDef, folders: dict[str, Path], tmp_path: Path) -> None:
    narrow = AdapterReader(model, AdapterLimits(slots=1, rank=2, targets=("attention/",)))
    with pytest.raises(ConfigError, match=r"has rank 8, more than task.lora.max_rank=2"):
        narrow.read(KEY, str(folders["one"]))
    with pytest.raises(ConfigError, match=r"changes .*mlp, which task.lora.targets does not include"):
        narrow.read(KEY, str(folders["three"]))
    with pytest.raises(ConfigError, match="does not exist"):
        narrow.read(KEY, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="contains no adapter"):
        narrow.read(KEY, str(GOLDEN))
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(base_model(), settings).save_pretrained(tmp_path / "dora")
    with pytest.raises(ConfigError, match="is a DoRA adapter"):
        narrow.read(KEY, str(tmp_path / "dora"))
    settings = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    peft.get_peft_model(base_model(), settings).save_pretrained(tmp_path / "embedding", save_embedding_layers=False)
    with pytest.raises(ConfigError, match="changes embedding; adapters of requests are for linear projections"):
        narrow.read(KEY, str(tmp_path / "embedding"))


def test_names_are_unique_and_slots_are_reused() -> None:
    table = AdapterTable(1)
    first = table.reserve("a", "x")
    table.add(first)
    with pytest.raises(AdapterError, match="is already loaded"):
        table.reserve("a", "x")
    with pytest.raises(AdapterError, match="no slot is free"):
        table.reserve("b", "x")
    table.remove("a")
    with pytest.raises(UnknownAdapterError, match="adapter 'a' is not loaded; loaded adapters: none"):
        table.remove("a")
    second = table.reserve("b", "y")
    assert second.slot == first.slot and second.prefix_root != first.prefix_root
