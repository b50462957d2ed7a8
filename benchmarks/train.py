"""Training steps: tokens per second beside peers, and share of the machine's matmul rate.

    python -m benchmarks.train [--shapes tiny baby gpt2] [--dtypes float32 bfloat16]
                               [--nanogpt CHECKOUT]

All contestants have the same sizes, batch, tokens, AdamW, clipping and mixed precision. See
`harness/shapes.py` for the cost of a token, and `peers/` for differences in a peer's model. The
limit is the rate of the same matmuls. "ready after" includes start, building, compiling and the
first steps.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contestants.limits import training_products
from benchmarks.harness.command import checkout_of_nanogpt, main, parser, with_device
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DTYPES, TRAINING, Shape
from benchmarks.harness.worker import Contestant


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case for each shape and dtype."""
    for shape in options.shapes:
        for dtype in options.dtypes:
            yield _case(TRAINING[shape], dtype, options.device, options.nanogpt)


def _case(shape: Shape, dtype: str, device: str, nanogpt: Path | None) -> Case:
    same = {"shape": shape.name, "dtype": dtype, "device": device}
    ours = "benchmarks.contestants.ours:train"
    contestants = [
        Contestant("Workhorse", ours, same),
        Contestant(
            "transformers", "benchmarks.peers.transformers:train", same, "with biases, as always"
        ),
        Contestant(
            "litgpt", "benchmarks.peers.litgpt:train", same, "rotary positions, untied head"
        ),
        Contestant("x-transformers", "benchmarks.peers.x_transformers:train", same),
    ]
    if dtype == "float32":  # only one variant: all processes coexist, in 24 GB for gpt2
        quicker = same | {"matmul_precision": "high"}
        note = "`matmul_precision: high`: a float32 value is multiplied as the sum of two bfloat16"
        contestants.append(Contestant("Workhorse, matmul high", ours, quicker, note))
    else:
        saving = same | {"mean_dtype": "bfloat16"}
        note = "AdamW's mean of gradients in bfloat16"
        contestants += [
            Contestant("Workhorse, compiled", ours, same | {"compiled": True}),
            Contestant("Workhorse, less memory", ours, saving, note),
        ]
    skipped: tuple[str, ...] = ()
    if nanogpt is None:
        skipped = ("nanoGPT: is not a package; give --nanogpt CHECKOUT",)
    else:
        own = same | {"checkout": str(nanogpt.resolve())}
        build = "benchmarks.peers.nanogpt:train"
        contestants += [
            Contestant("nanoGPT", build, own | {"compiled": False}),
            Contestant("nanoGPT, compiled", build, own | {"compiled": True}),
        ]
    limit = training_products(shape, dtype, device)
    name = f"{shape.name} {dtype}"
    return Case(name, "tokens", "tokens/s", tuple(contestants), limit, skipped=skipped)


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_device(parser(__doc__ or ""))
    made.add_argument("--shapes", nargs="+", choices=TRAINING, default=list(TRAINING))
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument(
        "--nanogpt", type=checkout_of_nanogpt, metavar="CHECKOUT", help="a checkout of nanoGPT"
    )
    return made


if __name__ == "__main__":
    main("train", cases, options().parse_args())
