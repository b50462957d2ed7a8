"""Names the design of a model in the terms of the literature: wiring, norm, positions, heads."""

from collections import Counter
from collections.abc import Callable

from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import (
    ParallelConfig,
    PostNormConfig,
    PreNormConfig,
    ReorderedNormConfig,
    SandwichNormConfig,
    WiringConfig,
)
from workhorse.nn.embedding import HeadConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.feedforward import ClampedGatedMlpConfig, GatedMlpConfig, MlpConfig
from workhorse.nn.norms import NormConfig
from workhorse.nn.positions.absolute import AlibiConfig

WIRINGS: dict[type[WiringConfig], str] = {
    PreNormConfig: "pre-norm",
    PostNormConfig: "post-norm",
    ReorderedNormConfig: "reordered norm (after each sub-layer)",
    SandwichNormConfig: "sandwich norm",
    ParallelConfig: "parallel sub-layers",
}
"""Names of the configs of blocks."""
NORMS = {"none": "no norm", "rms_norm": "RMSNorm", "layer_norm": "LayerNorm"}
GATED = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU", "relu": "ReGLU", "sigmoid": "GLU"}
"""Names of gated feed-forwards by their activation (2002.05202)."""
ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu": "ReLU", "relu2": "ReLU²"}
POSITIONS = {
    "none": "",
    "learned": "learned",
    "sinusoidal": "sinusoidal",
    "alibi": "ALiBi",
    "rope": "RoPE",
}


def design(config: DecoderConfig) -> dict[str, str]:
    """Return the design of a model by aspect, each in a few words of the literature.

    Returns:
        `wiring` (places of the norms and residuals), `norm`, `positions`, `attention` (how heads
        share keys and values), `reach` (windows and chunks), `scores` (what changes queries, keys
        and scores), `feed_forward`, `biases` and `head`. If layers differ, the numbers of layers
        are given. An aspect that the model lacks is empty.
    """
    blocks = [config.blocks[name] for name in config.layer_names()]

    def of(name: Callable[[WiringConfig], str]) -> str:
        found = Counter(map(name, blocks))
        if len(found) == 1:
            return next(iter(found))
        return ", ".join(
            f"{words} in {n_layers} of {len(blocks)} layers"
            for words, n_layers in found.items()
            if words
        )

    after_embedding = "" if config.embedding.norm.kind == "none" else ", also after the embedding"
    kind = config.embedding.position.kind
    embedded = POSITIONS.get(kind, kind)
    return {
        "wiring": of(_wiring),
        "norm": of(lambda block: _norm(block.norm)) + after_embedding,
        "positions": ", ".join(filter(None, (embedded, of(_position)))),
        "attention": of(_attention),
        "reach": of(reach),
        "scores": of(_scores),
        "feed_forward": of(_feed_forward),
        "biases": of(_biases),
        "head": _head(config.head),
    }


def in_one_line(config: DecoderConfig) -> str:
    """Return the design of a model in one line."""
    found = design(config)
    found["positions"] = f"positions: {found['positions'] or 'none'}"
    found["biases"] = f"biases: {found['biases'] or 'none'}"
    found["head"] = f"head: {found['head']}"
    return "; ".join(filter(None, found.values()))


def _wiring(block: WiringConfig) -> str:
    norms = {1: ", one norm", 2: ", two norms"}.get(getattr(block, "norms", 0), "")
    return WIRINGS.get(type(block), type(block).__name__) + norms


def _head(head: HeadConfig) -> str:
    has = {"with a bias": head.bias, f"soft-cap {head.cap or 0:g}": head.cap}
    return ", ".join(["tied" if head.tied else "untied", *(name for name in has if has[name])])


def _norm(norm: NormConfig) -> str:
    lacks = [part for part in ("weight", "bias") if getattr(norm, part, True) is False]
    times = " (1 + weight)" if getattr(norm, "offset", False) else ""
    return (
        NORMS.get(norm.kind, norm.kind)
        + times
        + (f" without {' or '.join(lacks)}" if lacks else "")
    )


def _position(block: WiringConfig) -> str:
    kind = block.attention.position.kind
    rope = block.rope
    if rope is None:
        usual = AlibiConfig().max_bias  # the bound of the paper
        bound = getattr(block.attention.position, "max_bias", usual)
        return POSITIONS.get(kind, kind) + (f" (maximum bias {bound:g})" * (bound != usual))
    part = "" if rope.fraction == 1 else f" on {rope.fraction:.0%} of a head"
    scaling = "" if rope.scaling is None else f", {rope.scaling.kind} scaling"
    return f"{POSITIONS[kind]}{part} (theta {rope.theta:,.0f}{scaling})"


def _attention(block: WiringConfig) -> str:
    n_heads = block.attention.n_heads
    n_kv_heads = block.attention.n_kv_heads or n_heads
    if block.grouped is None:
        return "MLA (latent)"
    if n_kv_heads == n_heads:
        return "MHA (multi-head)"
    grouped = f"GQA (grouped-query, {n_kv_heads} for {n_heads})"
    return "MQA (multi-query)" if n_kv_heads == 1 else grouped


def reach(block: WiringConfig) -> str:
    """Return the window or chunk of a layer's attention; empty if it sees all keys."""
    attention = block.attention
    if attention.chunk:
        return f"chunk {attention.chunk:,}"
    return f"window {attention.window:,}" if attention.window else ""


def _scores(block: WiringConfig) -> str:
    grouped = block.grouped
    if grouped is None:
        return ""
    has = {
        "query-key norm": grouped.qk_norm,
        f"clip {grouped.clip or 0:g}": grouped.clip,
        f"soft-cap {grouped.softcap or 0:g}": grouped.softcap,
        "sinks": grouped.sinks,
    }
    return " and ".join(name for name, there in has.items() if there)


def _feed_forward(block: WiringConfig) -> str:
    match block.feed_forward:
        case MlpConfig(activation=name):
            return ACTIVATIONS.get(name, name)
        case GatedMlpConfig(activation=name):
            return _gated(name)
        case MoEConfig(clamped=clamped, activation=name, shared=shared) as mixture:
            kind = "clamped SwiGLU" if clamped else _gated(name)
            beside = f" and {shared.d_ff // mixture.d_ff} shared" if shared else ""
            return f"{mixture.top_k} of {mixture.n_experts} {kind} experts{beside}"
        case ClampedGatedMlpConfig():
            return "clamped SwiGLU"


def _gated(activation: str) -> str:
    return GATED.get(activation, f"gated {activation}")


def _biases(block: WiringConfig) -> str:
    grouped = block.grouped
    has = {
        "q, k, v": grouped is not None and grouped.qkv_bias,
        "the attention's output": grouped is not None and grouped.out_bias,
        "the feed-forward": block.feed_forward.bias,
    }
    found = [name for name, there in has.items() if there]
    return "all" if len(found) == len(has) else ", ".join(found)
