"""Shared code for models like DeepSeek-V3: a few dense layers, then mixtures of experts.

Values for `config.json` come from the first dense layer or from the first mixture of experts.
"""

from collections.abc import Sequence
from typing import Any

from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.huggingface.family import Data, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import activation, gated_mlp
from workhorse.models.huggingface.moves import Rule, same, stacked
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig

DENSE, SPARSE = "dense", "sparse"


def dense_first(hf: Fields, n_dense: int) -> list[str]:
    """Return the kind of each layer: `n_dense` dense layers, then mixtures of experts (sparse)."""
    return [DENSE if n < n_dense else SPARSE for n in range(hf.need("num_hidden_layers", int))]


def written_n_dense(data: Data) -> int:
    """Return the number of layers before the first mixture of experts, for `config.json`."""
    kinds = [layer["feed_forward"]["kind"] for layer in data["layers"]]
    return kinds.index("moe") if "moe" in kinds else len(kinds)


def mlp_layer_types(hf: Fields, default: Sequence[str]) -> list[str]:
    """Read the kind of each layer's feed-forward: dense, or sparse (a mixture of experts).

    Args:
        hf: the config.
        default: kinds for a config that does not list them.

    Raises:
        ConfigError: the list has another length than the layers, or a kind is unknown.
    """
    kinds = hf.sequence("mlp_layer_types", str)
    if kinds is None:
        return list(default)
    n_layers = hf.need("num_hidden_layers", int)
    if len(kinds) != n_layers:
        raise ConfigError(
            f"{hf.where}: mlp_layer_types has length {len(kinds)} for {n_layers} layers; "
            "give one value per layer"
        )
    for kind in kinds:
        if kind not in (DENSE, SPARSE):
            remedy = nearest(kind, (DENSE, SPARSE))
            raise ConfigError(f"{hf.where}: mlp layer type {kind!r} is unknown; {remedy}")
    return kinds


def written_mlp_layer_types(data: Data) -> list[str]:
    """Return `mlp_layer_types` for `config.json`: dense or sparse for each layer."""
    kinds = (layer["feed_forward"]["kind"] for layer in data["layers"])
    return [SPARSE if kind == "moe" else DENSE for kind in kinds]


def of_dense(field: str) -> FieldPath:
    """Return a function that finds a field of the first dense feed-forward in a config."""
    return lambda data: _feed_forwards(data, sparse=False)[0][field]


def of_sparse(field: str) -> FieldPath:
    """Return a function that finds a field of the first mixture of experts in a config."""

    def find(data: Data) -> object:
        value: Any = _feed_forwards(data, sparse=True)[0]
        for part in field.split("."):
            value = value[part]
        return value

    return find


def n_shared_experts(data: Data) -> int:
    """Width of the shared expert divided by the width of a routed expert; 0 if there is none.

    Raises:
        KeyError: the result is not a whole number.
    """
    mixture = _feed_forwards(data, sparse=True)[0]
    width = mixture["shared"]["d_ff"] if mixture["shared"] else 0
    if width % mixture["d_ff"]:
        raise KeyError("n_shared_experts")
    return width // mixture["d_ff"]


def _feed_forwards(data: Data, *, sparse: bool) -> list[Data]:
    parts = (layer["feed_forward"] for layer in data["layers"])
    return [part for part in parts if (part["kind"] == "moe") == sparse]


def router_groups(hf: Fields, *, n_group: int = 1, topk_group: int = 1) -> Data:
    """Read the fields of `RouterConfig` that restrict the choice to the best groups of experts.

    Args:
        hf: the config.
        n_group: the family's default number of groups.
        topk_group: the family's default number of chosen groups.
    """
    groups, chosen = hf.get("n_group", n_group), hf.get("topk_group", topk_group)
    if groups == chosen:  # all groups are chosen: no restriction
        return {}
    return {"n_groups": groups, "top_groups": chosen, "group_score": "top2_sum"}


def sigmoid_mixture(
    hf: Fields,
    *,
    n_experts: int | None,
    top_k: int | None,
    d_ff: int,
    n_shared: int | None = 1,
    scale: float = 1.0,
    normalize: bool = True,
    count: str = "n_routed_experts",
    shared: str = "n_shared_experts",
    n_group: int = 1,
    topk_group: int = 1,
) -> MoEConfig:
    """Read a mixture of experts like DeepSeek-V3's (2412.19437 §2.1.2).

    Each expert has a sigmoid score and a bias that only affects the choice. The shared experts
    form one expert of their total width. A default of None makes the key required.

    Args:
        hf: the config.
        n_experts: default of the key `count`.
        top_k: default of `num_experts_per_tok`.
        d_ff: default of `moe_intermediate_size`.
        n_shared: default of the key `shared`.
        scale: default of `routed_scaling_factor`.
        normalize: default of `norm_topk_prob`.
        count: key with the number of routed experts.
        shared: key with the number of shared experts.
        n_group: default of `n_group`.
        topk_group: default of `topk_group`.
    """
    width = hf.get("moe_intermediate_size", d_ff)

    def number(key: str, default: int | None) -> int:
        return hf.need(key, int) if default is None else hf.get(key, default)

    return MoEConfig(
        n_experts=number(count, n_experts),
        top_k=number("num_experts_per_tok", top_k),
        d_ff=width,
        activation=activation(hf),
        router=RouterConfig(
            score="sigmoid",
            normalize=hf.optional("norm_topk_prob", bool, normalize) or False,
            scale=hf.get("routed_scaling_factor", scale),
            selection_bias=True,
            **router_groups(hf, n_group=n_group, topk_group=topk_group),
        ),
        shared=gated_mlp(hf, d_ff=width * number(shared, n_shared)),
    )


ROUTER_KEYS: dict[str, FieldPath] = {
    "n_group": of_sparse("router.n_groups"),
    "topk_group": of_sparse("router.top_groups"),
    "norm_topk_prob": of_sparse("router.normalize"),
    "routed_scaling_factor": of_sparse("router.scale"),
}
MIXTURE_KEYS: dict[str, FieldPath] = {
    "intermediate_size": of_dense("d_ff"),
    "moe_intermediate_size": of_sparse("d_ff"),
    "num_experts_per_tok": of_sparse("top_k"),
    "n_routed_experts": of_sparse("n_experts"),
    "n_shared_experts": n_shared_experts,
    "first_k_dense_replace": written_n_dense,
}
"""Usual keys of a mixture of experts, with the paths of their values in our config."""

FEED_FORWARD = "layers.{i}.feed_forward."
MLP = "model.layers.{i}.mlp."
EXPERT_RULES: tuple[Rule, ...] = tuple(
    stacked(f"{FEED_FORWARD}experts.{name}", f"{MLP}experts.{{*}}.{name}")
    for name in ("gate_proj", "up_proj", "down_proj")
)
SHARED_RULES: tuple[Rule, ...] = tuple(
    same(f"{FEED_FORWARD}shared.{name}", f"{MLP}shared_experts.{name}")
    for name in ("gate_proj", "up_proj", "down_proj")
)
MIXTURE_RULES: tuple[Rule, ...] = (
    same(FEED_FORWARD + "router.proj", MLP + "gate"),
    same(FEED_FORWARD + "router.selection_bias", MLP + "gate.e_score_correction_bias"),
    *EXPERT_RULES,
    *SHARED_RULES,
)
"""Usual rules for the tensors of a mixture of experts."""
