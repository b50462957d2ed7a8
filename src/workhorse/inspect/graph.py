"""Attribution graphs: how neurons, tokens and logits of one pass affect each other directly.

The pass is made linear: attention weights, the statistics of norms and the slopes of activations
are held fixed. Then every neuron is a weighted sum of the tokens' vectors and of the neurons before
it, so each edge is exact, and the edges into a node sum to its value. Attention is part of the
edges: a neuron affects later positions through the heads.

The file format is circuit-tracer's, whose viewer shows the graph. Its features are those of
transcoders; ours are the neurons of the model. Method: Circuit Tracing (Ameisen et al., 2025).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from workhorse.config.arguments import integer
from workhorse.errors import WorkhorseError
from workhorse.inspect.attribution import (
    NEURONS,
    LinearTracer,
    gates_of,
    has_neurons,
    leaves_of,
    line_through_zero,
)
from workhorse.inspect.trace import Trace
from workhorse.nn import Decoder
from workhorse.tokenizers import Tokenizer

_FEATURE = "cross layer transcoder"
"""The type of feature nodes in circuit-tracer's files."""


@dataclass(frozen=True)
class Graph:
    """An attribution graph. Nodes are in this order: features, errors, tokens, logits.

    All tensors are on the CPU.

    Attributes:
        tokens: the token ids, (seq).
        layers: number of layers of the decoder.
        features: (features, 3): layer, position and index of each neuron.
        activations: (features): their activations.
        logits: ids of the predicted tokens at the last position, most probable first.
        probabilities: their probabilities.
        edges: (nodes, nodes): the effect of the column's node on the row's node, which is slope
            times activation. Rows of errors and tokens are zero. An error is the sum of a
            layer's neurons at one position that are not features, or of a mixture of experts.
        constants: (nodes): the part of a node's value that comes from biases.
        values: (nodes): the value of each feature, and of each logit minus the mean of all logits.
            It equals the sum of the row plus the constant.
    """

    tokens: Tensor
    layers: int
    features: Tensor
    activations: Tensor
    logits: Tensor
    probabilities: Tensor
    edges: Tensor
    constants: Tensor
    values: Tensor

    def influence(self) -> Tensor:
        """Share of the logits' probability that flows through each node, (nodes).

        The edges into a node are divided by the sum of their absolute values.
        """
        strength = self.edges.abs()
        flow = strength / strength.sum(1, keepdim=True).clamp(min=1e-10)
        weight = torch.zeros(len(flow), dtype=flow.dtype)
        weight[-len(self.logits) :] = self.probabilities.to(flow.dtype)
        total = step = weight @ flow
        while step.any():  # ends after one step per layer: edges only lead forward
            step = step @ flow
            total = total + step
        return total

    def to_dict(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        name: str = "model",
        node_threshold: float = 0.8,
        edge_threshold: float = 0.98,
    ) -> dict[str, Any]:
        """The graph as plain data in the format of circuit-tracer, without weak nodes and edges.

        Args:
            tokenizer: writes token ids as text; None: as numbers.
            name: name of the model.
            node_threshold: share of the total influence that the nodes in the file have.
            edge_threshold: share of the weight of all edges that the edges in the file have.

        Raises:
            WorkhorseError: a threshold is not from 0 to 1.
        """
        for threshold in (node_threshold, edge_threshold):
            if not 0 <= threshold <= 1:
                raise WorkhorseError(
                    f"threshold={threshold} is not a share; choose one from 0 to 1"
                )
        reached = _reached(self.influence())
        nodes = list(self._nodes(reached.tolist(), tokenizer))
        always = torch.tensor([node["feature_type"] in ("embedding", "logit") for node in nodes])
        keep = always | (reached <= node_threshold)
        strength = self.edges.abs() * (keep[:, None] & keep)
        strong = (_reached(strength.flatten()) <= edge_threshold).view_as(strength) & (strength > 0)
        links = [
            {
                "source": nodes[source]["node_id"],
                "target": nodes[target]["node_id"],
                "weight": self.edges[target, source].item(),
            }
            for target, source in strong.nonzero().tolist()
        ]
        linked = strong.any(0) | strong.any(1) | always
        texts = [_text(tokenizer, token) for token in self.tokens.tolist()]
        return {
            "metadata": {
                "slug": name,
                "scan": name,
                "transcoder_list": [],
                "prompt_tokens": texts,
                "prompt": "".join(texts),
                "node_threshold": node_threshold,
                "schema_version": 1,
            },
            "qParams": {
                "pinnedIds": [],
                "supernodes": [],
                "linkType": "both",
                "clickedId": "",
                "sg_pos": "",
            },
            "nodes": [node for node, kept in zip(nodes, linked.tolist(), strict=True) if kept],
            "links": links,
        }

    def _nodes(
        self, reached: Sequence[float], tokenizer: Tokenizer | None
    ) -> Iterator[dict[str, Any]]:
        """All nodes in the format of circuit-tracer, in the order of `edges`."""
        seq, last = len(self.tokens), self.layers + 1
        shares = iter(reached)

        def node(kind: str, layer: int | str, index: int, at: int, **more: Any) -> dict[str, Any]:
            letter = "L" if kind == "logit" else layer
            return {
                "node_id": f"{layer}_{index}_{at}",
                "jsNodeId": f"{letter}_{index}-{0 if kind == _FEATURE else at}",
                "feature": index,
                "layer": str(layer),
                "ctx_idx": at,
                "reverse_ctx_idx": 0,
                "feature_type": kind,
                "run_idx": 0,
                "token_prob": 0.0,
                "is_target_logit": False,
                "influence": next(shares),
                "activation": None,
                "clerp": "",
                **more,
            }

        for (layer, at, neuron), value in zip(
            self.features.tolist(), self.activations.tolist(), strict=True
        ):
            pair = (layer + neuron) * (layer + neuron + 1) // 2 + neuron  # Cantor's pairing
            label = f"layer {layer}, neuron {neuron}"
            yield node(_FEATURE, layer, neuron, at, feature=pair, activation=value, clerp=label)
        for layer in range(self.layers):
            for at in range(seq):
                yield node("mlp reconstruction error", layer, -1, at)
        for at, token in enumerate(self.tokens.tolist()):
            yield node("embedding", "E", token, at, feature=at, clerp=_text(tokenizer, token))
        predicted = zip(self.logits.tolist(), self.probabilities.tolist(), strict=True)
        for rank, (token, share) in enumerate(predicted):
            label = f'Output "{_text(tokenizer, token)}" (p={share:.3f})'
            chosen = {"token_prob": share, "is_target_logit": rank == 0}
            yield node("logit", last, token, seq - 1, clerp=label, influence=None, **chosen)


@torch.inference_mode(False)  # and gradients, even inside `no_grad`
def attribution_graph(
    decoder: Decoder,
    tokens: Tensor | Sequence[int],
    *,
    n_features: int = 256,
    n_logits: int = 10,
    probability: float = 0.95,
) -> Graph:
    """Compute the attribution graph of the prediction after the last token.

    Args:
        decoder: see `Tracer`.
        tokens: token ids, (seq) or (1, seq).
        n_features: number of neurons that become features: those with the largest effect on the
            logits, through all paths. One backward pass is made for each.
        n_logits: maximum number of predicted tokens.
        probability: stop adding predicted tokens when they have this probability together.

    Raises:
        WorkhorseError: see `trace`; a logit is infinite or NaN; there is more than one sequence; or
            an argument is out of range.
    """
    n_features, n_logits = integer("n_features", n_features, 0), integer("n_logits", n_logits, 1)
    sources = [name for name in leaves_of(decoder, "neurons") if "feed_forward" in name]
    fixed = ["layers.*.attention.kernel.weights", *gates_of(decoder)]
    linear = LinearTracer(decoder, sources, fixed)
    for block in cast(list[Any], list(linear.decoder.layers)):
        if has_neurons(block):
            block.feed_forward.activation.register_forward_hook(_with_fixed_slope, prepend=True)

    run = linear.run(tokens, cut=False)
    if len(run.tokens) != 1:
        raise WorkhorseError(f"{len(run.tokens)} sequences have no common graph; give one")
    if not run.logits.isfinite().all():
        raise WorkhorseError("a logit is infinite or NaN; check the weights with statistics(run)")
    shares, ids = run.logits[0, -1].detach().softmax(-1).topk(min(n_logits, run.logits.shape[-1]))
    count = int((shares.cumsum(0) < probability).sum()) + 1
    shares, ids = shares[:count], ids[:count]
    features = _most_influential(run, sources, _demeaned(run, ids) @ shares, n_features)

    run = linear.run(tokens)
    neurons = [linear.uncut[sources[layer]][0, at, n] for layer, at, n in features.tolist()]
    values = torch.stack([*neurons, *_demeaned(run, ids)])
    first = len(features) + (len(sources) + 1) * run.tokens.shape[1]
    edges = values.new_zeros(first + len(ids), first + len(ids))
    constants = values.new_zeros(len(edges))
    for row, value in zip((*range(len(features)), *range(first, len(edges))), values, strict=True):
        edges[row, :first], constants[row] = _into(value, linear, run, features)
    return Graph(
        tokens=run.tokens[0].cpu(),
        layers=len(sources),
        features=features.cpu(),
        activations=values[: len(features)].detach().cpu(),
        logits=ids.cpu(),
        probabilities=shares.cpu(),
        edges=edges.detach().cpu(),
        constants=constants.detach().cpu(),
        values=values.detach().cpu(),
    )


def _demeaned(run: Trace, ids: Tensor) -> Tensor:
    """Logits minus their mean: a constant that is added to all logits has no effect."""
    logits = run.logits[0, -1]
    return logits[ids] - logits.mean()


def _most_influential(run: Trace, names: Sequence[str], of: Tensor, count: int) -> Tensor:
    """Layer, position and index of the neurons with the largest `|slope · activation|`."""
    layers = [layer for layer, name in enumerate(names) if name.endswith(NEURONS)]
    found = run.gradients(of, [names[layer] for layer in layers])
    effects = [(run[name] * slope)[0].detach().abs() for name, slope in found.items()]
    if not effects or count == 0:
        return torch.zeros(0, 3, dtype=torch.long, device=of.device)
    best = torch.cat([effect.flatten() for effect in effects]).topk(
        min(count, sum(effect.numel() for effect in effects))
    )
    sizes = best.indices.new_tensor([0, *(effect.numel() for effect in effects)])
    starts = sizes.cumsum(0)
    which = torch.searchsorted(starts, best.indices, right=True) - 1
    widths = sizes.new_tensor([effect.shape[-1] for effect in effects])[which]
    rest = best.indices - starts[which]
    return torch.stack([sizes.new_tensor(layers)[which], rest // widths, rest % widths], dim=1)


def _into(
    value: Tensor, linear: LinearTracer, run: Trace, features: Tensor
) -> tuple[Tensor, Tensor]:
    """Effects of the features, errors and tokens on a value, and the constant part of the value."""
    slopes, biases = linear.slopes(value, run), linear.biases()
    tokens, *layers = ((slopes[leaf] * run[leaf])[0] for leaf in linear.leaves)
    of_features = value.new_zeros(len(features))
    errors = []
    for layer, effect in enumerate(layers):
        own = features[:, 0] == layer
        at, neuron = features[own, 1], features[own, 2]
        of_features[own] = effect[at, neuron]
        errors.append(effect.sum(-1).index_add(0, at, -effect[at, neuron]))
    constants = [(slopes[name] * bias).sum() for name, bias in biases.items()]
    return torch.cat([of_features, *errors, tokens.sum(-1)]), sum(constants, value.new_zeros(()))


def _with_fixed_slope(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """An activation's output as a fixed multiple of its last input; a gate is held fixed."""
    return line_through_zero(module, args[-1:], output)


def _reached(amounts: Tensor) -> Tensor:
    """For each amount, the share of the total that it and all larger amounts have together."""
    ordered, order = amounts.sort(descending=True)
    shares = (ordered.cumsum(0) / ordered.sum().clamp(min=1e-10)).clamp(max=1)
    return torch.empty_like(amounts).scatter_(0, order, shares)


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None:
        return str(token)
    data = tokenizer.display_bytes(token)
    text = f"#{token}" if data is None else data.decode("utf-8", "replace")
    return text.replace("\n", "⏎").replace("\t", "→").replace("\r", "↵")
