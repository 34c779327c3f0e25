"""Mechanisms that a MaxText config switches on for any model: N:M sparsity, Engram, mixture of block attention."""

from maxhydra.cli.maxtext.translation import Translation


def sparsity(t: Translation) -> None:
    """Set optimizer.sparsity; without both numbers there is none, and its schedule has no effect."""
    sizes = {"weight_sparsity_n": "n", "weight_sparsity_m": "m"}
    if not t.trains or None in (t.settings[key] for key in sizes):
        return
    schedule = {"weight_sparsity_start_step": "start_step", "weight_sparsity_update_step": "update_every"}
    for key, name in (sizes | schedule).items():
        t.set(f"optimizer.sparsity.{name}", t.settings.count(key), from_keys=(key,))


def engram(t: Translation) -> None:
    """Set the memories of the option's kinds; an option without them would need kinds for the layers that have one."""
    keys = {
        "engram_num_heads": "num_heads",
        "engram_head_dim": "head_dim",
        "engram_vocab_bases": "vocab_sizes",
        "engram_kernel_size": "kernel_size",
        "engram_seed": "seed",
    }
    model, layers, orders = t.model, "engram_layers", "engram_max_ngram_size"
    used = model.layer_kinds()
    memories = [name for name in dict.fromkeys(used) if model.kinds[name].engram.vocab_sizes]
    found = [index for index, name in enumerate(used) if name in memories]
    if t.settings.given(layers) and list(t.settings[layers]) != found:
        t.unsupported(layers, f"set model.prefix; layers {found} of model={t.choices['model']} have a memory")
    if not memories:
        return
    count = len(model.kinds[memories[0]].engram.vocab_sizes) + 1
    if t.settings.given(orders) and t.settings[orders] != count:
        t.unsupported(orders, "set engram_vocab_bases, with an entry for each order")
    for key, name in keys.items():
        for kind in memories if t.settings.given(key) else ():
            t.set(f"model.kinds.{kind}.engram.{name}", t.settings[key], from_keys=(key,))


def moba(t: Translation) -> None:
    """Set the blocks of all layers with attention to all earlier tokens; latent attention has no such form."""
    if not t.settings["moba"]:
        return
    kinds = [name for name, kind in t.model.kinds.items() if kind.mixer.name == "attention"]
    if not kinds:
        t.unsupported("moba", f"model={t.choices['model']} has no layer with mixer=attention")
    for name in kinds:
        for key, path in {"moba_chunk_size": "block_size", "moba_topk": "top_k"}.items():
            t.set(f"model.kinds.{name}.attention.moba.{path}", t.settings.count(key), from_keys=("moba", key))
