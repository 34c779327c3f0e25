"""Mixtures of experts against the modules of transformers, with the same weights."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import EMB, HIDDEN, Mixture

from maxhydra.config import model as config

torch = pytest.importorskip("torch", reason="needs the parity extra")
transformers = pytest.importorskip("transformers", reason="needs the parity extra")

pytestmark = pytest.mark.parity

Scores, Group = config.RouterScores, config.GroupScore
SHARED = 20
# Model type, block, settings of its config, and the same as ours. Kernels of the experts are [E, outputs, inputs] in
# the first part, [E, inputs, outputs] in the second.
CASES = {
    "mixtral": ("MixtralSparseMoeBlock", {"num_local_experts": 6, "num_experts_per_tok": 2}, {}),
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
        {"router": config.Router(normalize=False)},
    ),
    "qwen3_next": (
        "Qwen3NextSparseMoeBlock",
        {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": SHARED},
        {"shared": config.Shared(dim=SHARED, gate=config.Gate.sigmoid)},
    ),
    "deepseek_v2": (
        "DeepseekV2Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
        },
        {
            "experts": 8,
            "router": config.Router(normalize=False, scale=1.5, groups=4, top_groups=2),
            "shared": config.Shared(dim=2 * HIDDEN),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
        },
        {
            "experts": 8,
            "router": config.Router(
                scores=Scores.sigmoid, scale=2.5, groups=4, top_groups=2, group_score=Group.top2_sum, bias_rate=0.001
            ),
            "shared": config.Shared(dim=HIDDEN),
        },
    ),
    "gpt_oss": (
        "GptOssMLP",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.0},
        {"bias": True, "clamp": 1.0, "router": config.Router(scores=Scores.softmax_of_chosen, bias=True)},
    ),
    "llama4": (
        "Llama4TextMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 1},
        {
            "top_k": 1,
            "router": config.Router(scores=Scores.sigmoid, normalize=False, scaled=config.Scaled.input),
            "shared": config.Shared(dim=HIDDEN),
        },
    ),
}
INPUTS_FIRST = ("gpt_oss", "llama4")


def their_block(model_type):
    name, settings, _ = CASES[model_type]
    short = "llama4_text" if model_type == "llama4" else model_type
    sizes = {"hidden_size": EMB, "intermediate_size": HIDDEN, "moe_intermediate_size": HIDDEN}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    full = transformers.AutoConfig.for_model(short, **sizes, hidden_act="silu", **settings)
    full._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    block = getattr(module, name)(full).float()
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(0, 0.3)
    return block


def by_our_names(state, model_type):
    """Their weights or gradients in our tree."""
    own = {name.split(".", 1)[-1] if name.startswith(("gate.", "router.")) else name: x for name, x in state.items()}
    gate_up, down = own.pop("experts.gate_up_proj"), own.pop("experts.down_proj")
    if model_type not in INPUTS_FIRST:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    halves = (lambda x: (x[..., ::2], x[..., 1::2])) if model_type == "gpt_oss" else lambda x: np.split(x, 2, axis=-1)
    gate, up = halves(gate_up)
    tree = {"router": {"kernel": own.pop("weight").T}, "experts": {}}
    tree["experts"] = {"gate": {"kernel": gate}, "up": {"kernel": up}, "down": {"kernel": down}}
    if "bias" in own:
        tree["router"]["bias"] = own.pop("bias")
        biases = (*halves(own.pop("experts.gate_up_proj_bias")), own.pop("experts.down_proj_bias"))
        for name, bias in zip(("gate", "up", "down"), biases, strict=True):
            tree["experts"][name]["bias"] = bias
    if "e_score_correction_bias" in own:
        tree["router"]["correction"] = own.pop("e_score_correction_bias")
    if "shared_expert_gate.weight" in own:
        tree["shared_gate"] = {"kernel": own.pop("shared_expert_gate.weight").T}
    shared = {name.split(".")[1].removesuffix("_proj"): {"kernel": x.T} for name, x in own.items()}
    return {**tree, "shared": shared} if shared else tree


@pytest.mark.parametrize("model_type", CASES)
def test_outputs_and_gradients_are_those_of_transformers(model_type):
    block = their_block(model_type)
    mixture = Mixture(config.Moe(**{"experts": 6, **CASES[model_type][2]}))
    weights = by_our_names({name: x.detach().numpy() for name, x in block.state_dict().items()}, model_type)
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(jnp.shape, mixture.weights)

    x, towards = mixture.inputs(2, 12), np.random.default_rng(1).normal(size=(2, 12, EMB)).astype(np.float32)
    out = block(torch.tensor(np.array(x)))
    out = (out[0] if isinstance(out, tuple) else out).reshape(x.shape)
    (out * torch.tensor(towards)).sum().backward()

    def ours(weights):
        fed = mixture(weights, x)
        return jnp.sum(fed.out_BTD * towards), fed.out_BTD

    (_, our_out), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(weights)
    np.testing.assert_allclose(our_out, out.detach().numpy(), atol=1e-5)
    grads = {name: np.zeros_like(x.detach().numpy()) for name, x in block.state_dict().items()}
    grads |= {name: p.grad.numpy() for name, p in block.named_parameters() if p.grad is not None}
    theirs = by_our_names(grads, model_type)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * (1 + np.abs(b).max())), gradient, theirs)


def test_the_balance_loss_is_that_of_transformers():
    """Theirs counts a token once for each of its experts, ours as one: a factor of top_k. The last third is padding."""
    mixture = Mixture(config.Moe(experts=6, top_k=2, balance_weight=1.0))
    x, real = mixture.inputs(2, 12), np.ones((2, 12), np.int64)
    real[:, 8:] = 0
    logits = torch.tensor(np.array(x @ mixture.weights["router"]["kernel"]).reshape(-1, 6))
    module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    theirs = module.load_balancing_loss_func((logits,), 6, 2, torch.tensor(real)) / 2
    ours = mixture(mixture.weights, x, segments=jnp.asarray(real)).side
    np.testing.assert_allclose(ours["loss"], theirs.item(), rtol=1e-5)
    assert ours["load"].sum() == real.sum() * 2
