"""A decoder in NumPy and float64, written from the papers' formulas: the reference for mechanisms without another one.

It takes the config and the weights of a model, and covers layers of grouped-query attention with an MLP or a mixture of
experts, norms=pre and RMSNorm. B batch, T tokens, D residual stream, N heads, K key heads, H head size, E experts.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from maxhydra.config.schema import model as config

Tree = dict[str, Any]


def hidden(model: config.Model, weights: Tree, ids: np.ndarray) -> np.ndarray:
    """Hidden states [B, T, D] after the final norm."""
    x = weights["embedding"]["table"][ids]
    if model.embedding.positions is config.Positions.sinusoidal:
        half = model.emb_dim // 2
        angles = np.arange(ids.shape[1])[:, None] / 10000 ** (np.arange(half) / (half - 1))
        x = x + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    x = np.repeat(x[:, :, None], model.hyper_connections.streams, axis=2)
    for index, name in enumerate(model.layer_kinds()):
        kind, layer = model.kinds[name], _layer_weights(model, weights, index)
        if kind.engram.vocab_sizes:
            x = x + _memory(model, kind, layer["engram"], x, ids)
        x = _layer(model, kind, layer, x)
    x = x.sum(axis=2)
    return _norm(x, weights["final_norm"]["scale"], model.norm_eps)


def _layer_weights(model: config.Model, weights: Tree, index: int) -> Tree:
    if index < len(model.prefix):
        found: Tree = weights["prefix"][str(index)]
        return found
    repetition, position = divmod(index - len(model.prefix), len(model.pattern))
    return _take(weights["pattern"][str(position)], repetition)


def _take(tree: Any, index: int) -> Any:
    return {name: _take(leaf, index) for name, leaf in tree.items()} if isinstance(tree, dict) else tree[index]


def _layer(model: config.Model, kind: config.Kind, w: Tree, x: np.ndarray) -> np.ndarray:
    """x: residual streams [B, T, n, D]."""

    def attend(x: np.ndarray) -> np.ndarray:
        return _attention(model, kind, w["attention"], _norm(x, w["attention_norm"]["scale"], model.norm_eps))

    def feed(x: np.ndarray) -> np.ndarray:
        return _feed_forward(kind, w["mlp"], _norm(x, w["mlp_norm"]["scale"], model.norm_eps))

    if model.hyper_connections.streams > 1:
        x = _connect(model, w["attention_streams"], x, attend)
        return _connect(model, w["mlp_streams"], x, feed)
    if kind.latent_dim is not None:
        return x + (feed(attend(x[:, :, 0])) @ w["up"]["kernel"])[:, :, None]
    x = x + attend(x[:, :, 0])[:, :, None]
    return x + feed(x[:, :, 0])[:, :, None]


def _connect(model: config.Model, w: Tree, x: np.ndarray, branch: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Equations of manifold-constrained hyper-connections (Xie et al., 2025), token by token."""
    out, n = np.empty_like(x), x.shape[2]
    pre, post, mix = np.empty((*x.shape[:2], n)), np.empty((*x.shape[:2], n)), np.empty((*x.shape[:2], n, n))
    for at in np.ndindex(*x.shape[:2]):
        u = _norm(x[at].reshape(-1), w["norm"]["scale"], model.norm_eps) @ w["kernel"]
        a, b = w["factor"], w["bias"]
        pre[at] = 1 / (1 + np.exp(-(a[0] * u[:n] + b[:n])))
        post[at] = 2 / (1 + np.exp(-(a[1] * u[n : 2 * n] + b[n : 2 * n])))
        matrix = np.exp(a[2] * u[2 * n :] + b[2 * n :]).reshape(n, n)
        for _ in range(model.hyper_connections.sinkhorn_iterations):
            matrix = matrix / matrix.sum(axis=0, keepdims=True)
            matrix = matrix / matrix.sum(axis=1, keepdims=True)
        mix[at] = matrix
    added = branch(np.einsum("btnd,btn->btd", x, pre))
    for at in np.ndindex(*x.shape[:2]):
        out[at] = mix[at] @ x[at] + np.outer(post[at], added[at])
    return out


def _memory(model: config.Model, kind: config.Kind, w: Tree, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Engram, token by token: hashed n-grams, the gate of each stream, and the dilated convolution."""
    section, (batch, length, n, width) = kind.engram, x.shape
    orders = len(section.vocab_sizes)
    bound = (2**31 - 1) // (model.vocab_size + 1) // 2
    odd = [2 * int(r) + 1 for r in np.random.default_rng(section.seed).integers(0, bound, orders + 1)]
    primes: list[list[int]] = []
    for start in section.vocab_sizes:
        used = [prime for order in primes for prime in order]
        is_prime = [p for p in range(start, 20 * start) if p not in used and all(p % q for q in range(2, p))]
        primes.append(is_prime[: section.num_heads])
    scale = {name: w[name].reshape(n, width) for name in ("key_norm", "query_norm", "filter_norm")}
    gated, taps = np.empty_like(x), w["filter"].reshape(section.kernel_size, n, width)
    for b, t in np.ndindex(batch, length):
        rows, first = [], 0
        for order in range(2, orders + 2):
            code = 0
            for back in range(order):
                code ^= (int(ids[b, t - back]) if t >= back else model.vocab_size) * odd[back]
            for prime in primes[order - 2]:
                rows.append(w["table"][first + code % prime])
                first += prime
        memory = np.concatenate(rows)
        key = _norm(
            (memory @ w["key"]["kernel"] + w["key"]["bias"]).reshape(n, width), scale["key_norm"], model.norm_eps
        )
        query = _norm(x[b, t], scale["query_norm"], model.norm_eps)
        s = np.sum(query * key, axis=-1) / np.sqrt(width)
        gate = 1 / (1 + np.exp(-np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6))))
        gated[b, t] = gate[:, None] * (memory @ w["value"]["kernel"] + w["value"]["bias"])
    normed, out = _norm(gated, scale["filter_norm"], model.norm_eps), gated.copy()
    for b, t in np.ndindex(batch, length):
        total = np.zeros((n, width))
        for tap in range(section.kernel_size):
            back = (section.kernel_size - 1 - tap) * (orders + 1)
            total += taps[tap] * normed[b, t - back] if t >= back else 0
        out[b, t] += total / (1 + np.exp(-total))
    return out


def _attention(model: config.Model, kind: config.Kind, w: Tree, x: np.ndarray) -> np.ndarray:
    query, key, value = (np.einsum("btd,dnh->btnh", x, w[name]["kernel"]) for name in ("query", "key", "value"))
    if kind.attention.rope.kind is not config.RopeKind.none:
        query, key = (_rotate(heads, kind.attention.rope.theta) for heads in (query, key))
    if kind.attention.value_norm:
        value = _norm(value, w["value_norm"]["scale"], model.norm_eps)
    group = query.shape[2] // key.shape[2]
    key, value = (np.repeat(heads, group, axis=2) for heads in (key, value))
    logits = np.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    length = x.shape[1]
    mask = np.broadcast_to(np.tril(np.ones((length, length), bool)), logits.shape).copy()
    if kind.attention.moba.block_size is not None:
        mask &= _block_mask(query, key, kind.attention.moba.block_size, kind.attention.moba.top_k)
    probabilities = _softmax(np.where(mask, logits, -np.inf))
    return np.einsum("bnts,bsnh,nhd->btd", probabilities, value, w["out"]["kernel"])


def _block_mask(query: np.ndarray, key: np.ndarray, size: int, top_k: int) -> np.ndarray:
    """[B, N, T, S] keys of the query's own block and of the top_k - 1 earlier ones with the best mean key."""
    batch, length, heads, _ = query.shape
    mask = np.zeros((batch, heads, length, length), bool)
    for b, t, n in np.ndindex(batch, length, heads):
        own = t // size
        scores = [query[b, t, n] @ key[b, block * size : (block + 1) * size, n].mean(axis=0) for block in range(own)]
        for block in [own, *np.argsort(scores)[::-1][: top_k - 1]]:
            mask[b, n, t, block * size : (block + 1) * size] = True
    return mask


def _feed_forward(kind: config.Kind, w: Tree, x: np.ndarray) -> np.ndarray:
    if kind.feed_forward is config.FeedForward.mlp:
        up = x @ w["up"]["kernel"]
        is_gated = kind.mlp.kind is config.MlpKind.gated
        hidden_units = _activate(kind.mlp.activation, x @ w["gate"]["kernel"] if is_gated else up)
        return (hidden_units * up if is_gated else hidden_units) @ w["down"]["kernel"]
    scores = _softmax(x @ w["router"]["kernel"])
    chosen = np.argsort(-scores, axis=-1)[..., : kind.moe.top_k]
    weight = np.zeros_like(scores)
    np.put_along_axis(weight, chosen, np.take_along_axis(scores, chosen, axis=-1), axis=-1)
    weight /= weight.sum(axis=-1, keepdims=True)
    gate, up, down = (w["experts"][name]["kernel"] for name in ("gate", "up", "down"))
    units = _activate(kind.moe.activation, np.einsum("btd,edf->btef", x, gate)) * np.einsum("btd,edf->btef", x, up)
    return np.einsum("btef,efd,bte->btd", units, down, weight)


def _activate(activation: config.Activation, x: np.ndarray) -> np.ndarray:
    functions = {
        config.Activation.silu: lambda: x / (1 + np.exp(-x)),
        config.Activation.relu: lambda: np.maximum(x, 0),
        config.Activation.relu_squared: lambda: np.maximum(x, 0) ** 2,
        config.Activation.sigmoid: lambda: 1 / (1 + np.exp(-x)),
        config.Activation.tanh: lambda: np.tanh(x),
        config.Activation.linear: lambda: x,
    }
    return functions[activation]()


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _rotate(heads: np.ndarray, theta: float) -> np.ndarray:
    half = heads.shape[-1] // 2
    angle = np.arange(heads.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
