"""Weights of Hugging Face's models in the layout of ours, and so their gradients too.

`get` returns an array of the public model by its name there.
"""

import numpy as np

from jaxbench.recipe.mixers import ExpertsConfig, LatentAttentionConfig, MambaConfig
from jaxbench.recipe.model import repeating_blocks, stacks


def transformer(model, get):
    """(variable, array) pairs of Llama, Nemotron and Qwen3."""
    cfg, (attention, mlp) = model.cfg, model.stacks[0].layers
    heads = cfg.attention

    def stack(name, convert=np.transpose):
        return np.stack([convert(get(f"model.layers.{i}.{name}")) for i in range(cfg.layers)])

    def split_heads(w):
        return w.T.reshape(cfg.embed, heads.kv_heads, -1, heads.head_dim)

    qkv = [stack(f"self_attn.{c}_proj.weight", split_heads) for c in "qkv"]
    out = stack("self_attn.o_proj.weight", np.asarray)
    yield model.embedding.table, get("model.embed_tokens.weight")
    yield model.head, get("lm_head.weight").T
    yield attention.mixer.qkv, np.concatenate(qkv, axis=3)
    yield attention.mixer.out, out.reshape(*out.shape[:2], heads.heads, heads.head_dim)
    if heads.qk_norm:
        yield attention.mixer.query_norm.gain, stack("self_attn.q_norm.weight")
        yield attention.mixer.key_norm.gain, stack("self_attn.k_norm.weight")
    if cfg.experts:
        gate_up = stack("mlp.experts.gate_up_proj", lambda w: w.transpose(0, 2, 1))
        yield mlp.mixer.router, stack("mlp.gate.weight")
        yield mlp.mixer.gate_up, gate_up.reshape(*gate_up.shape[:3], 2, -1)
        yield mlp.mixer.down, stack("mlp.experts.down_proj", np.asarray)
    else:
        up = stack("mlp.up_proj.weight")
        if hasattr(mlp.mixer, "gate_up"):
            yield mlp.mixer.gate_up, np.stack([stack("mlp.gate_proj.weight"), up], axis=2)
        else:
            yield mlp.mixer.up, up
        yield mlp.mixer.down, stack("mlp.down_proj.weight", np.asarray)
    for part in ("weight", "bias") if cfg.norm == "layer1p" else ("weight",):
        name = {"weight": "gain", "bias": "bias"}[part]
        yield getattr(attention.norm, name), stack(f"input_layernorm.{part}", np.asarray)
        yield getattr(mlp.norm, name), stack(f"post_attention_layernorm.{part}", np.asarray)
        yield getattr(model.norm, name), get(f"model.norm.{part}")


def gpt2(model, get):
    """(variable, array) pairs of GPT-2. Its matrices have the input first."""
    cfg, (attention, mlp) = model.cfg, model.stacks[0].layers
    heads = cfg.attention

    def stack(name):
        return np.stack([get(f"transformer.h.{i}.{name}") for i in range(cfg.layers)])

    def by_head(w):
        parts = w.reshape(*w.shape[:-1], 3, heads.heads, heads.head_dim)
        return np.moveaxis(parts, -3, -2)

    out = stack("attn.c_proj.weight")
    out = out.reshape(cfg.layers, heads.heads, heads.head_dim, cfg.embed)
    yield model.embedding.table, get("transformer.wte.weight")
    yield model.embedding.positions, get("transformer.wpe.weight")
    yield attention.mixer.qkv, by_head(stack("attn.c_attn.weight"))
    yield attention.mixer.qkv_bias, by_head(stack("attn.c_attn.bias"))
    yield attention.mixer.out, np.moveaxis(out, -1, 1)
    yield attention.mixer.out_bias, stack("attn.c_proj.bias")
    yield mlp.mixer.up, stack("mlp.c_fc.weight")
    yield mlp.mixer.up_bias, stack("mlp.c_fc.bias")
    yield mlp.mixer.down, stack("mlp.c_proj.weight").transpose(0, 2, 1)
    yield mlp.mixer.down_bias, stack("mlp.c_proj.bias")
    for name, part in (("weight", "gain"), ("bias", "bias")):
        yield getattr(attention.norm, part), stack(f"ln_1.{name}")
        yield getattr(mlp.norm, part), stack(f"ln_2.{name}")
        yield getattr(model.norm, part), get(f"transformer.ln_f.{name}")


def mamba_weights(get, m: MambaConfig):
    """A mixer in this layout: columns z, x, b, c, dt, ordered by group."""
    inner, state = m.inner * m.groups, m.state * m.groups

    def by_group(w, *sizes):
        parts = np.split(w, np.cumsum(sizes)[:-1], axis=0)
        return np.concatenate([p.reshape(m.groups, -1, *w.shape[1:]) for p in parts], axis=1)

    projection = by_group(get("in_proj.weight"), inner, inner, state, state, m.heads)
    taps = by_group(get("conv1d.weight")[:, 0], inner, state, state)
    return {
        "in_proj": projection.transpose(2, 0, 1),
        "out": get("out_proj.weight").reshape(-1, m.groups, m.inner),
        "groups.taps": taps.transpose(0, 2, 1),
        "groups.bias": by_group(get("conv1d.bias"), inner, state, state),
        "groups.dt_bias": get("dt_bias").reshape(m.groups, -1),
        "groups.a_log": get("A_log").reshape(m.groups, -1),
        "groups.d": get("D").reshape(m.groups, -1),
        "groups.gain": get("norm.weight").reshape(m.groups, -1),
    }


def expert_weights(get, experts: ExpertsConfig):
    """Experts without gate, a shared one, and a router with a bias."""
    weights = {
        "router": get("gate.weight").T,
        "bias": get("gate.e_score_correction_bias"),
        "up": get("experts.up_proj").transpose(0, 2, 1),
        "down": get("experts.down_proj"),
        "shared.up": get("shared_experts.up_proj.weight").T,
        "shared.down": get("shared_experts.down_proj.weight"),
    }
    if experts.latent:
        weights["into_latent"] = get("fc1_latent_proj.weight").T
        weights["out_of_latent"] = get("fc2_latent_proj.weight")
    return weights


def hybrid(model, get):
    """(variable, array) pairs of Nemotron-H and Nemotron 3."""
    cfg, index = model.cfg, 0
    yield model.embedding.table, get("model.embeddings.weight")
    yield model.head, get("lm_head.weight").T
    yield model.norm.gain, get("model.norm_f.weight")
    for stack, (letters, times) in zip(model.stacks, repeating_blocks(cfg), strict=True):
        for position, letter in enumerate(letters):
            layer, repeats = stack.layers[position], []
            for repeat in range(times):
                number = index + repeat * len(letters) + position

                def weight(name, number=number):
                    return get(f"model.layers.{number}.mixer.{name}")

                if letter == "M":
                    weights = mamba_weights(weight, cfg.mamba)
                elif letter == "E":
                    weights = expert_weights(weight, cfg.experts)
                elif letter == "*":
                    parts = [weight(f"{c}_proj.weight").T.reshape(32, 2, -1, 16) for c in "qkv"]
                    out = weight("o_proj.weight").reshape(32, 4, 16)
                    weights = {"qkv": np.concatenate(parts, axis=2), "out": out}
                else:
                    weights = {
                        "up": weight("up_proj.weight").T,
                        "down": weight("down_proj.weight"),
                    }
                repeats.append(weights | {"norm": get(f"model.layers.{number}.norm.weight")})
            for name in repeats[0]:
                variable = layer.norm.gain if name == "norm" else layer.mixer
                for attribute in name.split(".") if name != "norm" else ():
                    variable = getattr(variable, attribute)
                yield variable, np.stack([weights[name] for weights in repeats])
        index += times * len(letters)


def halves(w, rope_dim):
    """A projection whose last columns are turned in pairs of neighbours, here in halves."""
    still, turned = np.split(w, [w.shape[-1] - rope_dim], axis=-1)
    return np.concatenate([still, turned[..., 0::2], turned[..., 1::2]], axis=-1)


def latent_attention(get, a: LatentAttentionConfig):
    """The weights of latent attention."""
    query = get("q_b_proj.weight").T.reshape(a.query_latent, a.heads, -1)
    latents = get("q_a_proj.weight").T, halves(get("kv_a_proj_with_mqa.weight").T, a.rope_dim)
    return {
        "latent": np.concatenate(latents, axis=-1),
        "query_norm.gain": get("q_a_layernorm.weight"),
        "kv_norm.gain": get("kv_a_layernorm.weight"),
        "query": halves(query, a.rope_dim),
        "key_value": get("kv_b_proj.weight").T.reshape(a.kv_latent, a.heads, -1),
        "out": get("o_proj.weight").reshape(-1, a.heads, a.value_dim),
    }


def gated_mlp(get):
    """The weights of a gated MLP."""
    halves = (get(f"{part}_proj.weight").T for part in ("gate", "up"))
    return {"gate_up": np.stack(list(halves), axis=1), "down": get("down_proj.weight")}


def deepseek(model, get):
    """(variable, array) pairs of DeepSeek-V3."""
    cfg, first = model.cfg, 0
    yield model.embedding.table, get("model.embed_tokens.weight")
    yield model.head, get("lm_head.weight").T
    yield model.norm.gain, get("model.norm.weight")
    layers = [f"model.layers.{layer}" for layer in range(cfg.layers)]
    if prediction := model.prediction:
        layers.append("mtp.0.mtp_block")
        yield prediction.embedding_norm.gain, get("mtp.0.enorm.weight")
        yield prediction.hidden_norm.gain, get("mtp.0.hnorm.weight")
        yield prediction.project, get("mtp.0.eh_proj.weight").T
        yield prediction.norm.gain, get("mtp.0.post_norm.weight")
    for stack, (letters, times) in zip(model.stacks, stacks(cfg), strict=True):
        repeats = []
        for layer in layers[first : first + times]:

            def weight(name, layer=layer):
                return get(f"{layer}.{name}")

            def inside(part, weight=weight):
                return lambda inner: weight(f"{part}.{inner}")

            attention = latent_attention(inside("self_attn"), cfg.latent_attention)
            if letters == "LE":
                gate_up = weight("mlp.experts.gate_up_proj").transpose(0, 2, 1)
                shared = gated_mlp(inside("mlp.shared_experts"))
                mlp = {
                    "router": weight("mlp.gate.weight").T,
                    "bias": weight("mlp.gate.e_score_correction_bias"),
                    "gate_up": gate_up.reshape(*gate_up.shape[:2], 2, -1),
                    "down": weight("mlp.experts.down_proj"),
                    **{f"shared.{name}": w for name, w in shared.items()},
                }
            else:
                mlp = gated_mlp(inside("mlp"))
            norms = {
                "0.norm.gain": weight("input_layernorm.weight"),
                "1.norm.gain": weight("post_attention_layernorm.weight"),
            }
            mixers = {f"0.mixer.{name}": w for name, w in attention.items()}
            mixers |= {f"1.mixer.{name}": w for name, w in mlp.items()}
            repeats.append(mixers | norms)
        first += times
        for name in repeats[0]:
            index, *attributes = name.split(".")
            variable = stack.layers[int(index)]
            for attribute in attributes:
                variable = getattr(variable, attribute)
            yield variable, np.stack([weights[name] for weights in repeats])


def gpt_oss(model, get):
    """(variable, array) pairs of GPT-OSS. Its columns of gate and up projection alternate."""
    cfg, heads, experts = model.cfg, model.cfg.attention, model.cfg.experts
    yield model.embedding.table, get("model.embed_tokens.weight")
    yield model.head, get("lm_head.weight").T
    yield model.norm.gain, get("model.norm.weight")

    def split_heads(w):
        return np.moveaxis(w, 0, -1).reshape(*w.shape[1:], heads.kv_heads, -1, heads.head_dim)

    for position, layer in enumerate(model.stacks[0].layers):

        def stack(name, convert=np.asarray, first=position // 2):
            layers = range(first, cfg.layers, len(cfg.pattern) // 2)
            return np.stack([convert(get(f"model.layers.{i}.{name}")) for i in layers])

        mixer = layer.mixer
        if position % 2 == 0:
            names = [f"self_attn.{c}_proj" for c in "qkv"]
            weights = [stack(f"{name}.weight", split_heads) for name in names]
            biases = [stack(f"{name}.bias", split_heads) for name in names]
            yield mixer.qkv, np.concatenate(weights, axis=3)
            yield mixer.qkv_bias, np.concatenate(biases, axis=2)
            out = stack("self_attn.o_proj.weight")
            yield mixer.out, out.reshape(*out.shape[:2], heads.heads, heads.head_dim)
            yield mixer.out_bias, stack("self_attn.o_proj.bias")
            yield mixer.sinks, stack("self_attn.sinks")
            yield layer.norm.gain, stack("input_layernorm.weight")
            continue
        yield mixer.router, stack("mlp.router.weight", np.transpose)
        yield mixer.biases.router, stack("mlp.router.bias")
        gate_up = stack("mlp.experts.gate_up_proj")
        bias = stack("mlp.experts.gate_up_proj_bias")
        halves = (experts.ffn, 2)
        yield mixer.gate_up, gate_up.reshape(*gate_up.shape[:3], *halves).swapaxes(-1, -2)
        yield mixer.biases.up, bias.reshape(*bias.shape[:2], *halves).swapaxes(-1, -2)
        yield mixer.down, stack("mlp.experts.down_proj", lambda w: w.transpose(0, 2, 1))
        yield mixer.biases.down, stack("mlp.experts.down_proj_bias")
        yield layer.norm.gain, stack("post_attention_layernorm.weight")
