"""muP's coordinate check, as a page: `python -m studies.coordinates`.

What a few training steps change in what each layer adds to the residual stream, and in the logits,
against the width (2203.03466, appendix D.1). Where a learning rate holds at any width, the lines
are flat. It takes about a minute.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor

from studies.depth import rms
from studies.page import Section, write_page
from workhorse.nn import Decoder, DecoderConfig, next_token_loss
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import OptimizerConfig, build_optimizer
from workhorse.optim.muon import MuonConfig
from workhorse.train.report.chart import Series, line_chart

WIDTHS = (32, 64, 128, 256, 512, 1024)
BASE_WIDTH = 32
STEPS, LAYERS, ROWS, SEQ, VOCAB, HEAD_DIM = 5, 2, 8, 32, 64, 16
RATE = 0.01
MUP = AdamWConfig(learning_rate=RATE, base_width=BASE_WIDTH)
RULES: dict[str, OptimizerConfig] = {
    "usual": AdamWConfig(learning_rate=RATE),
    "muP": MUP,
    "Muon": MuonConfig(learning_rate=0.02, scale="spectral", adamw=MUP),
}

Changes = dict[str, list[tuple[int, float]]]
"""By part of the model, pairs of a width and the root mean square of what the steps changed."""


def decoder_of(width: int) -> Decoder:
    """A fresh decoder of a width, by muP's rules of initialisation."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": width,
        "n_layers": LAYERS,
        "max_seq_len": SEQ,
        "blocks": {
            "main": {
                "kind": "pre_norm",
                "norm": {"kind": "rms_norm"},
                "attention": {
                    "kind": "attention",
                    "n_heads": width // HEAD_DIM,
                    "position": {"kind": "rope"},
                },
                "feed_forward": {"kind": "mlp", "d_ff": 4 * width, "activation": "gelu"},
            }
        },
        "final_norm": {"kind": "rms_norm"},
        "init": {"kind": "fan_in", "embedding_std": 1.0, "head": "zero"},
    }
    return DecoderConfig.from_dict(given).build()


def changes(rules: str, widths: Sequence[int] = WIDTHS) -> Changes:
    """What `STEPS` steps change at each width.

    Args:
        rules: a name in `RULES`.
        widths: to train at.
    """
    found: Changes = {}
    for width in widths:
        decoder = decoder_of(width)
        tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
        before = coordinates(decoder, tokens[:, :-1])
        optimizer = build_optimizer(decoder, RULES[rules])
        for _ in range(STEPS):
            decoder.zero_grad()
            loss, count = next_token_loss(decoder(tokens[:, :-1]), tokens[:, 1:])
            (loss / count).backward()
            optimizer.step(1.0)
        for part, after in coordinates(decoder, tokens[:, :-1]).items():
            found.setdefault(part, []).append((width, rms(after - before[part])))
    return found


@torch.no_grad()
def coordinates(decoder: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """What each layer adds to the stream, and the logits."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _m, inputs, output, name=name: seen.update({name: output - inputs[0]})
        )
        for name, layer in decoder.layers.named_children()
    ]
    logits = decoder(tokens)
    for hook in hooks:
        hook.remove()
    return {f"layer {name}": added for name, added in seen.items()} | {"logits": logits}


def slopes(found: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, float]:
    """The power of the width with which each part's change grows."""
    return {
        part: linear_regression(
            [math.log(width) for width, _ in points], [math.log(size) for _, size in points]
        ).slope
        for part, points in found.items()
    }


def sections() -> list[Section]:
    """All of the page, a section for each set of rules."""
    made = []
    for rules in RULES:
        found = changes(rules)
        grown = ", ".join(f"{part} {slope:+.2f}" for part, slope in slopes(found).items())
        series = [
            Series(part, [(math.log2(width), math.log2(size)) for width, size in points])
            for part, points in found.items()
        ]
        made.append(
            Section(
                rules,
                f"Grows with this power of the width: {grown}.",
                [
                    line_chart(
                        f"change after {STEPS} steps, against the width, as powers of two", series
                    )
                ],
            )
        )
    return made


def main() -> None:
    """Write the page."""
    write_page("coordinates", "The coordinate check", sections, about=__doc__)


if __name__ == "__main__":
    main()
