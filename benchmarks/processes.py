"""Training by two processes of one thread each, compared with one: total tokens per second.

    python -m benchmarks.processes [--dtypes float32 bfloat16] [--scaling strong weak]
        [--kinds data shard]

Strong scaling: the batch stays the same. Weak scaling: each process has the batch of the single
one. The plain loop trains the same decoder with PyTorch's operators, with DistributedDataParallel
and `fully_shard`; Workhorse uses native operators. `exact` is `parallel.reduction: exact` with 8
logical shards, so each of two processes takes four passes. For comparison, `shard` is also measured
with four passes that are not exact, and exact with two logical shards.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.command import main, parser
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import DTYPES, TRAINING
from benchmarks.harness.worker import Contestant

SHAPE = "baby"
PROCESSES = 2
PARTS = 8
EXACT = {"reduction": {"kind": "exact", "logical_shards": PARTS}}
WHOLE: dict[str, dict[str, Any]] = {
    "data": {"data": PROCESSES},
    "data, exact": {"data": PROCESSES, **EXACT},
    "context": {"context": PROCESSES},
    "tensor": {"tensor": PROCESSES},
    "pipeline": {"pipeline": PROCESSES},
}
SHARDED: dict[str, dict[str, Any]] = {
    "shard": {"shard": PROCESSES},
    "shard, four passes": {"shard": PROCESSES},
    "shard, exact": {"shard": PROCESSES, **EXACT},
    "shard, kept for the step": {"shard": PROCESSES, "reshard": "step"},
    "shard, kept for the step, exact": {"shard": PROCESSES, "reshard": "step", **EXACT},
    "shard, exact of two": {
        "shard": PROCESSES,
        "reduction": {"kind": "exact", "logical_shards": 2},
    },
}
KINDS = {
    "data": (WHOLE, {"DistributedDataParallel": "ddp"}),
    "shard": (SHARDED, {"fully_shard": "fsdp"}),
}
"""Ours and plain loops that run in the same rounds; all at once take too much memory."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Two cases for each kind of scaling and dtype."""
    for scaling in options.scaling:
        for dtype in options.dtypes:
            for kind in options.kinds:
                yield _case(scaling, dtype, kind)


def _case(scaling: str, dtype: str, kind: str) -> Case:
    ours, plain = KINDS[kind]
    rows = TRAINING[SHAPE].batch
    one = {"shape": SHAPE, "dtype": dtype, "processes": 1, "rows": rows}
    two = one | {"processes": PROCESSES, "rows": rows * (PROCESSES if scaling == "weak" else 1)}
    build = "benchmarks.contestants.several:train"
    of_ours = {"how": "workhorse"}
    at_once = {"shard, four passes": {"micro_batch_size": two["rows"] // PARTS}}
    contestants = [
        Contestant("Workhorse", build, one | of_ours),
        Contestant("Workhorse, exact", build, one | of_ours | {"parallel": EXACT}),
        *(
            Contestant(
                f"Workhorse × 2, {name}",
                build,
                {**two, **of_ours, "parallel": parallel, **at_once.get(name, {})},
            )
            for name, parallel in ours.items()
        ),
        Contestant("plain loop", build, one | {"how": "ddp"}),
        *(
            Contestant(f"plain loop × 2, {name}", build, two | {"how": how})
            for name, how in plain.items()
        ),
    ]
    return Case(f"{scaling} {dtype}, {kind}", "tokens", "tokens/s", tuple(contestants))


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument(
        "--scaling", nargs="+", choices=["strong", "weak"], default=["strong", "weak"]
    )
    options.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options.set_defaults(threads=1)
    main("processes", cases, options.parse_args())
