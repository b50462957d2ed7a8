"""Direct logit attribution: which parts of a model a logit comes from.

Every part adds its output to the residual stream, and the final norm and the head read the sum.
With the statistics of norms held fixed, this path is linear, so a logit is the sum over parts of
`∂logit/∂output · output`, plus the biases on the path. Other nonlinear functions on the path (a
soft-cap, the activation of the head) are replaced by the line through zero and their value. No term
is computed as a remainder: the terms sum to the logit because each of them is right.

Paper: A Mathematical Framework for Transformer Circuits (Elhage et al., 2021).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from workhorse.config.arguments import check_choice, token_ids
from workhorse.errors import WorkhorseError, shown
from workhorse.inspect.trace import Edits, Trace, Tracer, check_reference
from workhorse.nn import Decoder
from workhorse.nn.norms import Norm, norm_facts
from workhorse.transforms.record import transforms_of

Parts = Literal["sublayers", "heads", "neurons"]
Target = int | Sequence[int] | Tensor
NEURONS = "feed_forward.down_proj.x"
LARGE = 500_000_000
"""Number of parameters up to which attributions are computed in float64: 4 GB of weights."""
_INPUTS = ("layers.*.attention.x", "layers.*.feed_forward.x")
"""The inputs of sub-layers: with these fixed, only direct paths to the logits remain."""


@dataclass(frozen=True)
class Attribution:
    """The terms of one logit, or of a weighted sum of logits.

    Attributes:
        logit: the logit, in the precision of `LinearTracer`.
        token: the term of the token's own vector.
        position: the term of the position vector that is added to it; 0 if there is none.
        terms: the terms of the layers, by the name of the tensor that they come from: a scalar for
            a sub-layer, (heads,) for attention heads, (d_ff,) for neurons.
        biases: the terms of the biases on the path, by parameter.
    """

    logit: float
    token: float
    position: float
    terms: dict[str, Tensor]
    biases: dict[str, float]

    @property
    def total(self) -> float:
        """The sum of all terms, which equals `logit` up to rounding."""
        layers = sum(term.sum().item() for term in self.terms.values())
        return self.token + self.position + layers + sum(self.biases.values())


class LinearTracer(Tracer):
    """A `Tracer` whose path from the parts of the model to the logits is linear.

    It computes with a copy of the weights in float64, or in float32 if the decoder is quantised or
    has more than `LARGE` parameters. The codes of quantised weights are not copied.

    Args:
        decoder: see `Tracer`.
        leaves: names of the tensors that gradients end at, in addition to `embedding`.
        constants: names of the tensors that are held fixed.
    """

    @torch.inference_mode(False)  # and gradients, even inside `no_grad`
    def __init__(
        self, decoder: Decoder, leaves: Sequence[str], constants: Sequence[str] = _INPUTS
    ) -> None:
        super().__init__(decoder)
        _own_parameters(self.decoder, _precision(decoder))
        self.leaves, self.constants = ("embedding", *leaves), constants
        self.uncut: dict[str, Tensor] = {}
        for module in self.decoder.modules():
            if norm_facts(module) is not None:
                module.register_forward_hook(_with_fixed_statistics, prepend=True)
        for module in _nonlinear(self.decoder):
            module.register_forward_hook(line_through_zero, prepend=True)

    def run(self, tokens: Tensor | Sequence[int], *, cut: bool = True) -> Trace:
        """One forward pass with gradients from the logits to the leaves.

        Args:
            tokens: see `trace`.
            cut: False to let gradients flow on through the leaves, to the embedding. The leaves
                before the cut are in `uncut`.
        """

        def leaf(name: str, x: Tensor) -> Tensor:
            self.uncut[name] = x
            return x.detach().requires_grad_()

        constants: Edits = dict.fromkeys(self.constants, Tensor.detach)
        cuts: Edits = {name: partial(leaf, name) for name in self.leaves[: None if cut else 1]}
        return self(tokens, edits={**constants, **cuts}, gradients=True)

    def biases(self) -> dict[str, Tensor]:
        """All biases by name: the constant terms of the linear path."""
        return {name: bias for name, bias in self.decoder.named_parameters() if bias.requires_grad}

    def slopes(self, of: Tensor, run: Trace) -> dict[str, Tensor]:
        """Gradients of a scalar with respect to the leaves and the biases, by name."""
        ends = {leaf: run[leaf] for leaf in self.leaves} | self.biases()
        found = torch.autograd.grad(of, [*ends.values()], retain_graph=True, materialize_grads=True)
        return dict(zip(ends, found, strict=True))

    @torch.inference_mode(False)  # and gradients, even inside `no_grad`
    def attribute(self, run: Trace, target: Target, position: int = -1) -> Attribution:
        """Divide a logit of a pass into its terms; see `attribute`."""
        tokens, logits = run.tokens, run.logits
        positions = range(-tokens.shape[1], tokens.shape[1])
        if len(tokens) != 1 or isinstance(position, bool | float) or position not in positions:
            raise WorkhorseError(
                f"position={position} is not in tokens of shape {tuple(tokens.shape)}; "
                "give one sequence and a position in it"
            )
        logit = (logits[0, position] * _weights(target, logits)).sum()
        slopes = self.slopes(logit, run)
        token, along = run["embedding.positions.x"][0, position], slopes["embedding"][0, position]
        biases = {name: (slopes[name] * bias).sum().item() for name, bias in self.biases().items()}
        return Attribution(
            logit=logit.item(),
            token=(along @ token).item(),
            position=(along @ (run["embedding"][0, position] - token)).item(),
            terms={
                leaf: _per_part(leaf, (slopes[leaf] * run[leaf])[0, ..., position, :].detach())
                for leaf in self.leaves[1:]
            },
            biases={name: term for name, term in biases.items() if term},
        )


def attribute(
    decoder: Decoder,
    tokens: Tensor | Sequence[int],
    target: Target,
    *,
    position: int = -1,
    parts: Parts = "sublayers",
) -> Attribution:
    """Divide a logit into one term per part of the model.

    Args:
        decoder: see `Tracer`.
        tokens: token ids, (seq) or (1, seq).
        target: a token id; two ids, for the difference of their logits; or a tensor (vocab) of one
            weight per logit.
        position: index of the token whose prediction is divided.
        parts: `sublayers`: every attention and every feed-forward. `heads`: every attention head,
            and every feed-forward. `neurons`: every head and every neuron; a mixture of experts
            stays one part.

    Raises:
        WorkhorseError: see `trace`; or there is no such target or position.
    """
    linear = LinearTracer(decoder, leaves_of(decoder, parts))
    return linear.attribute(linear.run(tokens), target, position)


def leaves_of(decoder: Decoder, parts: Parts) -> list[str]:
    """Names of the outputs of the parts, before linear maps to the residual stream."""
    check_reference(decoder)
    check_choice("parts", parts, get_args(Parts))
    found: list[str] = []
    for number, block in enumerate(decoder.layers):
        heads = "attention_branch" if parts == "sublayers" else "attention.kernel"
        divided = parts == "neurons" and has_neurons(block)
        neurons = NEURONS if divided else "feed_forward_branch"
        found += [f"layers.{number}.{heads}", f"layers.{number}.{neurons}"]
    return found


def has_neurons(block: nn.Module) -> bool:
    """True if the feed-forward of a block is not a mixture of experts."""
    return hasattr(block.feed_forward, "down_proj")


def gates_of(decoder: Decoder) -> list[str]:
    """Names of the gates that multiply the outputs of heads."""
    return [
        f"layers.{number}.attention.gate.proj"
        for number, block in enumerate(decoder.layers)
        if hasattr(getattr(block.attention, "gate", None), "proj")
    ]


def _nonlinear(decoder: Decoder) -> Iterator[nn.Module]:
    """The nonlinear modules on the path, except norms and sub-layers."""
    yield decoder.head.cap
    for step in decoder.head.transform.children():
        if norm_facts(step) is None and not isinstance(step, nn.Linear):
            yield step
    for block in decoder.layers:
        if clip := getattr(block.attention, "v_clip", None):
            yield clip


def _per_part(leaf: str, products: Tensor) -> Tensor:
    """One term per part: heads from (heads, width), neurons from (d_ff), else from (d_model)."""
    return products if leaf.endswith(NEURONS) else products.sum(-1)


def _weights(target: Target, logits: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    if isinstance(target, Tensor) and target.shape == (vocab,) and target.is_floating_point():
        return target.to(logits)
    rule = f"a target is a token id from 0 to {vocab - 1}, two ids, or one weight per logit"
    several = isinstance(target, Sequence) or getattr(target, "ndim", 0)
    ids = token_ids(target if several else [target], rule, "give one of these")
    if len(ids) not in (1, 2) or min(ids) < 0 or max(ids) >= vocab:
        raise WorkhorseError(f"{rule}, not {shown(target)}; give one of these")
    weights = logits.new_zeros(vocab)
    for token, sign in zip(ids, (1, -1), strict=False):
        weights[token] += sign
    return weights


def _precision(decoder: Decoder) -> torch.dtype:
    quantized = any(applied.name == "quantize" for applied in transforms_of(decoder))
    large = sum(weight.numel() for weight in decoder.parameters()) > LARGE
    return torch.float32 if quantized or large else torch.float64


def _own_parameters(decoder: Decoder, dtype: torch.dtype) -> None:
    """Copy all parameters of a decoder. Only biases require gradients."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in decoder.modules():
        for name, shared in module.named_parameters(recurse=False):
            if shared not in made:
                value = shared.detach().to(dtype, copy=True)
                made[shared] = nn.Parameter(value, requires_grad=name == "bias")
            setattr(module, name, made[shared])


def _with_fixed_statistics(norm: Norm, args: tuple[Tensor], output: Tensor) -> Tensor:
    """A norm's output, as a linear function of its input: its mean square is a constant."""
    x = args[0].to(args[0].dtype if output.dtype == torch.float64 else torch.float32)
    facts = norm_facts(norm)
    assert facts is not None
    x = x - x.mean(-1, keepdim=True) if facts.centred else x
    y = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt().detach()
    y = y if norm.weight is None else y * (norm.weight + norm.offset)
    return (y if norm.bias is None else y + norm.bias).to(output.dtype)


def line_through_zero(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Replace a function by a line through zero: its output as a fixed multiple of its input."""
    del module
    x = args[0]
    return x * torch.where(x == 0, 0, output / x).detach()
