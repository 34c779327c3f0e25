"""Embeddings and scores equal those of transformers, on one device and on a mesh, and clients can read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Pooling, Sampling
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.convert.hf import hf_source
from maxhydra.convert.load import load_weights
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server import PoolingRoutes, ServerDefaults
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.pooling_routes import EMBEDDINGS, SCORE
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.model import build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.openai_shapes import check_shape
from tests.support.running_server import RunningServer
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")
openai = import_optional("openai", extra="test")

pytestmark = pytest.mark.parity

ROWS = [[1, 5, 9, 2, 6], [3, 3, 7, *range(11, 31)], [2], [7, 8, 9]]
TEXTS = ["To be, or not to be", "that is the question", "whether"]


def start(folder: Path, *, devices: int = 1) -> Engine:
    described = hf_source("x", str(folder), folder).model
    model = build(config.Model(**{**vars(described), "dtypes": config.Dtypes(compute=config.Dtype.float32)}))
    mesh = Mesh(fsdp=devices) if devices > 1 else Mesh()  # type: ignore[call-arg]
    sharder = Sharder(build_mesh(mesh, jax.devices()[:devices]), RULES)
    weights = load_weights(str(folder), model, shardings=sharder.tree(model.base.axes), dtype="float32")
    settings = EngineConfig(max_batch=4, cache_tokens=256, page_size=4, max_context=64)  # type: ignore[call-arg]
    return Engine(model, weights, ByteTokenizer(), settings, sharder=sharder, eos=())


def llama(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 0, "initializer_range": 0.3}
    settings = transformers.LlamaConfig(vocab_size=320, max_position_embeddings=64, **sizes, **more)
    model = getattr(transformers, kind)(settings).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama(path, "LlamaForCausalLM")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = start(folder)
    yield made
    made.close()


def expected(folder: Path, ids: list[int], pooling: Pooling) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden[-1] if pooling is Pooling.last else hidden.mean(0), dim=0).numpy()


@pytest.mark.slow
@pytest.mark.default_cases("Pooling.mean")
@pytest.mark.parametrize("pooling", list(Pooling))
def test_embeddings_equal_the_hidden_states_of_transformers(engine: Engine, folder: Path, pooling: Pooling) -> None:
    found = engine.pool(ROWS, pooling)
    for ids, vector in zip(ROWS, found, strict=True):
        np.testing.assert_allclose(vector, expected(folder, ids, pooling), atol=1e-5)


@pytest.mark.slow
def test_a_mesh_gives_the_same_embeddings(engine: Engine, folder: Path) -> None:
    sharded = start(folder, devices=2)
    try:
        np.testing.assert_allclose(
            sharded.pool(ROWS, Pooling.last), engine.pool(ROWS, Pooling.last), rtol=1e-4, atol=1e-5
        )
    finally:
        sharded.close()


def routes(engine: Engine, *, is_reward_model: bool = False) -> PoolingRoutes:
    prompts = PromptEncoder(compose([]).config.data, vocab_size=320)
    defaults = ServerDefaults("tiny", Sampling(max_tokens=4), 8, 320, 64)  # type: ignore[call-arg]
    return PoolingRoutes(engine, prompts, defaults, Pooling.last, is_reward_model)


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_openai_client_reads_embeddings(engine: Engine, folder: Path, processes: int) -> None:
    made = routes(engine)
    engine.max_context = 64  # type: ignore[attr-defined]
    server = RunningServer(engine, made.prompts, max_sequences=9, processes=processes, pooling=Pooling.last)
    try:
        client = server.client()
        # The client asks for base64 unless an encoding is named.
        binary = client.embeddings.create(model="tiny", input=TEXTS)
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        status, scored = server.post({"text_1": TEXTS[0], "text_2": TEXTS}, SCORE)
        shape = server.post({"input": TEXTS}, EMBEDDINGS)[1]
        missing = server.post({"input": "x", "dimensions": 8}, EMBEDDINGS)
    finally:
        server.end(closes_engine=False)
    ids = [made.prompts.encode_text(text) for text in TEXTS]
    vectors = np.array([expected(folder, each, Pooling.last) for each in ids])
    for response in (binary, plain):
        np.testing.assert_allclose([item.embedding for item in response.data], vectors, atol=1e-5)
        assert [item.index for item in response.data] == [0, 1, 2]
        assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, ids))
    check_shape(openai.types.CreateEmbeddingResponse, shape)
    assert status == 200 and scored["object"] == "list" and scored["id"].startswith("score-")
    found = [(item["index"], item["object"]) for item in scored["data"]]
    assert found == [(0, "score"), (1, "score"), (2, "score")]
    np.testing.assert_allclose([item["score"] for item in scored["data"]], vectors @ vectors[0], atol=1e-5)
    assert missing[0] == 400 and "accepted: 32" in missing[1]["error"]["message"]


@pytest.mark.slow
def test_a_reward_model_scores_completions(tmp_path: Path) -> None:
    reference = llama(tmp_path, "LlamaForSequenceClassification")
    scorer = start(tmp_path)
    made = routes(scorer, is_reward_model=True)
    try:
        response = made.respond(SCORE, json.dumps({"text_1": TEXTS[0], "text_2": TEXTS[1:]}).encode())
    finally:
        scorer.close()
    tokenizer = made.prompts.tokenizer
    for item, text in zip(response["data"], TEXTS[1:], strict=True):
        ids = [*made.prompts.encode_text(TEXTS[0]), *tokenizer.encode(text), tokenizer.eos]
        with torch.no_grad():
            (value,) = reference(torch.tensor([ids])).logits[0].tolist()
        assert item["score"] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": ["x", 3]}, "input"),
        (EMBEDDINGS, {"input": [[1, 999]]}, "input"),
        (EMBEDDINGS, {"input": "x" * 200}, "input"),
        (EMBEDDINGS, {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        (EMBEDDINGS, {"input": "x", "model": "other"}, "model"),
        (EMBEDDINGS, {"inputs": "x"}, "inputs"),
        (SCORE, {"text_1": "x"}, "text_2"),
        (SCORE, {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
    ],
)
def test_invalid_requests_name_the_field(engine: Engine, path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        routes(engine).respond(path, json.dumps(body).encode())
    assert caught.value.body()["error"]["param"] == param
