"""Published sizes: parameters of every model option, and FLOPs per token."""

import dataclasses
import functools
from importlib import resources

import jax
import jax.numpy as jnp
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema import model as config
from maxhydra.config.schema.config import parameter_estimate
from maxhydra.layers import Context
from maxhydra.model import active_parameters, build, flops_per_token, parameter_count
from maxhydra.model.decoder import DecoderSpec
from maxhydra.sharding import Sharder

PUBLISHED = {
    "gemma4-26b": 25_233_141_790,
    "gemma4-31b": 30_697_345_340,
    "gemma4-e2b": 4_628_569_379,
    "gemma4-e4b": 7_463_013_418,
    # Tensors of the encoders in transformers, on the device "meta".
    "gemma4-26b-vision": 25_233_141_790 + 572_794_416,
    "gemma4-31b-vision": 30_697_345_340 + 575_743_536,
    "gemma4-e2b-vision": 4_628_569_379 + 168_544_704,
    "gemma4-e4b-vision": 7_463_013_418 + 169_331_136,
    "gemma4-e2b-audio": 4_628_569_379 + 307_184_384,
    "gemma4-e4b-audio": 7_463_013_418 + 308_757_248,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "deepseek-custom": 4_221_258_900,
    "deepseek2-16b": 15_706_484_224,
    "deepseek2-236b": 235_741_434_880,
    "deepseek3-671b": 671_026_419_200,
    "deepseek3-671b-2dfsdp": 671_026_419_200,
    "deepseek3-671b-batchsplit": 671_026_419_200,
    "deepseek3-test": 13_360_651_520,
    "deepseek3.2-671b": 671_877_944_064,
    "kimi-k2-1t": 1_026_408_232_448,
    "glm4.7-30b-a3b": 29_943_393_920,
    "glm4.5-106b-a12b": 106_852_251_264,
    "glm4.5-355b-a32b": 352_797_829_024,
    "glm5-744b-a40b": 743_911_218_432,
    # Parameters and router biases in transformers, on the device "meta".
    "nemotron3-30b-a3b": 31_577_937_344 + 2_944,
    "nemotron3-120b-a12b": 120_668_687_360 + 20_480,
    "minimax-m2-230b-a10b": 228_689_764_864,
    "mistral4-119b": 118_972_826_624,
    "smollm3-3b": 3_075_098_624,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-base": 30_532_122_624,
    "qwen3-custom-30b-a3b": 30_348_048_384,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-480b-a35b": 480_154_875_392,
    "qwen3-omni-30b-a3b": 30_532_122_624 + 2 * 128 * 2048,
    "qwen3-omni-30b-a3b-audio": 30_532_122_624 + 2 * 128 * 2048 + 647_927_168,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama4-17b-16e": 107_769_861_120,
    "llama4-17b-128e": 400_711_848_960,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-27b": 27_227_128_320,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "gemma3-4b": 3_880_263_168,
    "llama4-17b-16e-vision": 108_641_793_536,
    "llama4-17b-128e-vision": 401_583_781_376,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3.5-9b-vision": 9_409_813_744,
    "qwen3.5-35b-a3b-vision": 35_107_181_936,
    "qwen3-omni-30b-a3b-media": 31_719_205_488,
    "gemma3-4b-vision": 4_300_079_472,
    "gemma3-12b-vision": 12_187_325_040,
    "gemma3-27b-vision": 27_432_406_640,
    "gpt3-175b": 174_780_997_632,
    "gpt3-22b": 22_049_107_968,
    "gpt3-52k": 52_464,
    "gpt3-6b": 5_588_736_000,
    "llama3.1-70b-Instruct": 70_553_706_496,
    "llama3.1-8b-Instruct": 8_030_261_248,
    "olmo-hybrid-7b": 7_430_870_688,
    "olmo3-32b": 32_233_522_176,
    "olmo3-7b": 7_298_011_136,
    "olmo3-7b-pt": 7_298_011_136,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-1.7b-base": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-14b-base": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-base": 4_022_468_096,
    "qwen3-4b-thinking-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-8b-base": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-135m-instruct": 134_515_008,
}
FOLDER = resources.files("maxhydra.conf").joinpath("model")
# Those that are models of themselves.
FILES = {file.name.removesuffix(".yaml"): file for file in FOLDER.iterdir() if not file.name.startswith("from_hf")}

# Models whose layers, experts or encoders differ most.
SAMPLED = ["deepseek3.2-671b", "gemma4-26b-vision", "gemma4-e2b-audio", "glm4.5-106b-a12b", "gpt-oss-20b", "gpt3-52k"]
SAMPLED += ["granite4-hybrid-tiny", "kimi-linear-tiny", "lfm2-tiny", "llama3.1-405b", "llama4-17b-16e-vision"]
SAMPLED += ["mixtral-8x22b", "nemotron3-30b-a3b", "qwen3-30b-a3b", "qwen3.5-397b-a17b"]


load = functools.cache(model_option)


@pytest.mark.slow
@pytest.mark.default_cases(*SAMPLED)
@pytest.mark.parametrize("name", sorted(FILES))
def test_every_option_has_its_published_size(name):
    count = parameter_count(build(load(name)).shapes)
    if name in PUBLISHED:
        assert count == PUBLISHED[name]
        # The closed form, which needs no model.
        assert parameter_estimate(load(name)) == pytest.approx(count, rel=0.05)
    else:
        assert ("tiny" in name or "micro" in name) and count < 1_000_000


@pytest.mark.slow
@pytest.mark.default_cases("mxfp4_weights-4")
@pytest.mark.parametrize(("format", "bits"), [("int8_weights", 8), ("int4_weights", 4), ("mxfp4_weights", 4)])
def test_formats_of_weights_include_experts_next_to_an_mlp(format, bits):
    """Those of Gemma 4 are most of its weights, and in another part of the layer than the experts of other families."""
    overrides = ["model=gemma4-26b", "model.num_layers=6", "task=decode", f"quantization={format}"]
    composed = compose(overrides).config
    arrays = jax.tree_util.tree_leaves_with_path(build(composed.model, quantization=composed.quantization).shapes)
    stored = sum(array.size * array.dtype.itemsize for path, array in arrays if "experts" in jax.tree_util.keystr(path))
    # 128 experts of width 704 in each layer, and scales.
    count = 6 * 128 * 3 * 2816 * 704
    assert 1 < 8 * stored / (bits * count) < 1.2


def test_default_model_is_a_byte_model_in_float32():
    tiny = load("tiny")
    assert tiny.vocab_size >= 259
    assert tiny.dtypes.compute is config.Dtype.float32


@pytest.mark.slow
def test_active_parameters_leave_out_the_experts_that_a_token_does_not_use():
    """12.9 billion of Mixtral, by its model card. Dense: all."""
    assert active_parameters(load("mixtral-8x7b")) == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336 == 12_879_925_248
    assert active_parameters(load("llama3-8b")) == PUBLISHED["llama3-8b"]


@pytest.mark.exhaustive
def test_active_parameters_of_mixtures_are_the_published_ones():
    """3.3, 12.8, 22 and 5.1 billion (their model cards; that of the last leaves out the embedding)."""
    assert active_parameters(load("qwen3-30b-a3b")) // 10**8 == 33
    assert round(active_parameters(load("nemotron3-120b-a12b")) / 1e8) == 128
    assert round(active_parameters(load("qwen3-235b-a22b")) / 1e9) == 22
    assert round((active_parameters(load("gpt-oss-120b")) - 201088 * 2880) / 1e9, 1) == 5.1


def test_flops_of_a_mixture_count_the_active_experts():
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 3 * 4096 * 14336) + 4096 * 32000
    assert flops_per_token(load("mixtral-8x7b"), 4096) == 6 * matrices + 12 * 32 * 4096 * 2048.5


def test_flops_of_llama3_8b_by_hand():
    """6 per weight of a matrix (the embedding is a lookup), and 12 x heads x head_dim x keys seen (4096.5)."""
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    assert matrices == 7_504_658_432
    attention = 12 * 32 * 32 * 128 * 4096.5
    assert flops_per_token(load("llama3.1-8b"), 8192) == 6 * matrices + attention


def test_flops_with_an_adapter_leave_the_gradients_of_frozen_weights_out():
    """4 per weight of a matrix; attention costs as much as without an adapter."""
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    flops = flops_per_token(load("llama3.1-8b"), 8192, has_adapter=True)
    assert flops == pytest.approx(4 * matrices + 12 * 32 * 32 * 128 * 4096.5, rel=1e-4)


def test_flops_of_a_window_count_the_attended_keys():
    """Of 16384 tokens the first 4096 see 2048.5 on average, the others 4096 each."""
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 32000
    keys = (4096 * 2048.5 + 12288 * 4096) / 16384
    assert flops_per_token(load("mistral-7b"), 16384) == 6 * matrices + 12 * 32 * 4096 * keys


@pytest.mark.slow
def test_flops_match_what_the_compiler_counts():
    """A forward pass with all layers written out; the compiler counts masked logits too, so they are added here."""
    length, sizes = 64, {"num_layers": 2, "emb_dim": 256, "mlp_dim": 512, "num_heads": 4, "num_kv_heads": 2}
    model = config.Model(
        **sizes,
        head_dim=64,
        vocab_size=512,
        context_length=64,
        kinds={"layer": config.Kind()},
        scan_unroll=2,
        dtypes=config.Dtypes(compute=config.Dtype.float32),
    )
    definition, single = build(model), Sharder.single()

    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        ctx = Context(positions=positions, segments=None, sharder=single, cache=None, dropout_key=None)
        return definition.logits(params, definition.hidden(params, tokens, ctx)[0], single)

    tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
    counted = jax.jit(forward).lower(definition.shapes, tokens).compile().cost_analysis()["flops"] / (2 * length)
    masked = 2 * 4 * 4 * 64 * (length - (length + 1) / 2)
    assert flops_per_token(model, length) / 3 + masked == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(
    ("name", "layers", "devices", "platform", "unroll"),
    [
        ("llama3.2-1b", 16, 1, "gpu", 16),
        ("llama3.2-1b", 16, 8, "gpu", 2),
        ("llama3.2-1b", 16, 1, "cpu", 1),
        ("llama3.1-405b", 126, 1, "gpu", 1),
        ("qwen3-30b-a3b", 8, 1, "gpu", 8),
        ("qwen3-30b-a3b", 48, 1, "gpu", 1),
    ],
)
def test_layers_are_unrolled_for_training_on_one_gpu(
    name: str, layers: int, devices: int, platform: str, unroll: int
) -> None:
    model = dataclasses.replace(model_option(name), num_layers=layers)
    spec = DecoderSpec.of(model)
    assert spec.unroll_on(platform, devices) == unroll and spec.unroll_on(platform, devices, is_cached=True) == 1
    assert DecoderSpec.of(dataclasses.replace(model, scan_unroll=2)).unroll_on(platform, devices) == 2
