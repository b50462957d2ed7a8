"""What 100 layers do to activations and gradients, as a page: `python -m studies.depth`.

Claim C3 (1607.06450) and, beside it, Xavier's and He's initialisation against depth, and what each
kind of norm looks at. Nothing is trained; it takes about ten seconds.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from studies.page import Section, write_page
from workhorse.nn import Decoder, DecoderConfig, next_token_loss
from workhorse.train.report.chart import Series, line_chart

LAYERS, WIDTH, SEQ, ROWS, VOCAB = 100, 32, 16, 8, 31
PLAIN_WIDTH = 256
WIRINGS = ("pre_norm", "post_norm")
NORMS = ("layer_norm", "rms_norm", "none")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
SUITED = {"tanh": "Xavier", "relu": "He", "sigmoid": "Xavier"}
"""The initialisation that each activation is usually given."""
INITS: dict[str, Callable[[Tensor], object]] = {
    "normal, 0.02": lambda weight: nn.init.normal_(weight, std=0.02),
    "Xavier": nn.init.xavier_uniform_,
    "He": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}
LOWEST = 1e-40
"""Smaller sizes count as this one, as zero has no logarithm."""


def decoder_of(wiring: str, norm: str) -> Decoder:
    """A fresh decoder of `LAYERS` layers, whose matrices have variance 2 / fan-in at any depth."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "n_layers": LAYERS,
        "max_seq_len": SEQ,
        "blocks": {
            "main": {
                "kind": wiring,
                "norm": {"kind": norm},
                "attention": {"kind": "attention", "n_heads": 4},
                "feed_forward": {"kind": "mlp", "d_ff": 4 * WIDTH, "activation": "relu"},
            }
        },
        "final_norm": {"kind": norm},
        "init": {"kind": "he", "embedding_std": 1.0, "residual": "plain"},
    }
    return DecoderConfig.from_dict(given).build()


def through(decoder: Decoder) -> tuple[list[float], list[float]]:
    """After each layer, the root mean square of the stream and of the loss's gradient in it."""
    sizes = [0.0] * LAYERS
    gradients = [0.0] * LAYERS

    def watch(layer: int) -> Callable[..., None]:
        def seen(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            sizes[layer] = rms(output)
            output.register_hook(lambda gradient: gradients.__setitem__(layer, rms(gradient)))

        return seen

    for number, layer in enumerate(decoder.layers.children()):
        layer.register_forward_hook(watch(number))
    tokens = torch.randint(VOCAB, (ROWS, SEQ + 1))
    loss, count = next_token_loss(decoder(tokens[:, :-1]), tokens[:, 1:])
    (loss / count).backward()
    return sizes, gradients


@torch.no_grad()
def through_plain(
    init: Callable[[Tensor], object], activation: str, *, centred: bool = False
) -> list[float]:
    """After each layer `activation(weight @ x)`, without residual or norm, the root mean square.

    If `centred`, the mean of all tokens is subtracted first: what remains differs between tokens.
    """
    torch.manual_seed(0)
    x, sizes = torch.randn(ROWS * SEQ, PLAIN_WIDTH), []
    for _ in range(LAYERS):
        weight = torch.empty(PLAIN_WIDTH, PLAIN_WIDTH)
        init(weight)
        x = ACTIVATIONS[activation](x @ weight.T)
        sizes.append(rms(x - x.mean(dim=0) if centred else x))
    return sizes


def rms(x: Tensor) -> float:
    """The root mean square, in float64."""
    return x.detach().double().square().mean().sqrt().item()


class OverSequence(nn.Module):
    """LayerNorm over the wrong axis, the sequence: a mistake that circulates."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (
            x.var(1, keepdim=True, unbiased=False) + 1e-5
        ).sqrt()


class OverBatch(nn.Module):
    """BatchNorm over all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


def what_norms_see() -> list[list[str]]:
    """How much a token's output changes where it should not, a row for each norm."""
    torch.manual_seed(0)
    x = torch.randn(4, SEQ, WIDTH)
    other_row, later = x.clone(), x.clone()
    other_row[1:] = 3 * torch.randn(3, SEQ, WIDTH)
    later[:, SEQ // 2 :] = 3 * torch.randn(4, SEQ // 2, WIDTH)
    kinds = {
        "BatchNorm": OverBatch(),
        "LayerNorm over the sequence": OverSequence(),
        "LayerNorm": nn.LayerNorm(WIDTH),
        "RMSNorm": nn.RMSNorm(WIDTH),
    }
    rows = [["norm", "other texts of the batch change", "later tokens change", "evaluation mode"]]
    for name, norm in kinds.items():
        plain = norm(x)
        by_row = (norm(other_row)[0] - plain[0]).abs().max().item()
        by_later = (norm(later)[:, : SEQ // 2] - plain[:, : SEQ // 2]).abs().max().item()
        by_mode = (norm.eval()(x) - plain).abs().max().item()
        rows.append([name, *(f"{change:.2g}" for change in (by_row, by_later, by_mode))])
    return rows


def sections() -> list[Section]:
    """All of the page."""
    runs = {(w, n): through(decoder_of(w, n)) for w in WIRINGS for n in NORMS}
    return [
        Section(
            "Activations through 100 layers",
            "The root mean square of the residual stream of a fresh decoder, as a power of ten. "
            "Norms bound what a layer adds: with pre-norm the stream grows like the root of the "
            "number of layers, with post-norm it stays. Without norms it explodes, and a line ends "
            "where a number is not finite.",
            [_chart(w, {n: runs[w, n][0] for n in NORMS}) for w in WIRINGS],
        ),
        Section(
            "Gradients back through them",
            "The gradient of the loss in the stream after each layer, on its way from the last to "
            "the first.",
            [_chart(w, {n: runs[w, n][1] for n in NORMS}) for w in WIRINGS],
        ),
        Section(
            "Xavier, He and neither",
            "Layers activation(W x) without residual and norm. Xavier's variance, 2 / (fan in + "
            "fan out), keeps the size where tanh is linear, but ReLU takes half of the variance "
            "away at each layer; He's, 2 / fan in, makes up for that half. A fixed deviation of "
            "0.02 is too small for this width.",
            [
                _chart(name, {init: through_plain(fill, name) for init, fill in INITS.items()})
                for name in ("tanh", "relu")
            ],
        ),
        Section(
            "What still differs between tokens",
            "The same layers, but without the mean of all tokens, and each activation with the "
            "initialisation that it is usually given. A sigmoid of zero is 1/2, so its outputs "
            "keep their size. Its slope is at most 1/4, so the differences between tokens vanish "
            "within a few layers, as gradients do on their way back.",
            [
                _chart(
                    "differences between tokens",
                    {
                        f"{name}, {init}": through_plain(INITS[init], name, centred=True)
                        for name, init in SUITED.items()
                    },
                )
            ],
        ),
        Section(
            "What a norm looks at",
            "The largest change of a token's output where nothing of its own changed. BatchNorm's "
            "figures come from the other texts, and from later tokens, which a language model may "
            "not see. It also computes something else once it is not training.",
            rows=what_norms_see(),
        ),
    ]


def _chart(title: str, lines: dict[str, list[float]]) -> str:
    series = [
        Series(name, [(layer + 1, _log(size)) for layer, size in enumerate(sizes)])
        for name, sizes in lines.items()
    ]
    return line_chart(f"{title}: power of ten, after each layer", series)


def _log(size: float) -> float:
    return math.log10(max(size, LOWEST)) if math.isfinite(size) else math.nan


def main() -> None:
    """Write the page."""
    write_page("depth", "Depth, norms and initialisation", sections, about=__doc__)


if __name__ == "__main__":
    main()
