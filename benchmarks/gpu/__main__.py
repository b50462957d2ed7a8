"""GPU measurements in five blocks of less than ten minutes each.

    python -m benchmarks.gpu BLOCK … [--only REGEX] [--device cpu --tiny] [--out FILE]

Results are lines of JSON, written as they arrive. If a check fails, its error is the result, and
the next check runs. To test a block, run it on a CPU first, with sizes that need seconds.
"""

import argparse
import datetime
import importlib
import re
from pathlib import Path

import torch

from benchmarks.gpu.block import Setting, keep, run
from benchmarks.harness.machine import describe, versions

BLOCKS = ("correct", "speed", "memory", "decoding", "scale")
"""Blocks in order of importance; each is a module with a function `checks`."""
SECONDS = 540.0


def main() -> None:
    """Run the requested blocks."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument(
        "blocks", nargs="+", choices=BLOCKS, metavar="BLOCK", help=", ".join(BLOCKS)
    )
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="use sizes for a CPU")
    options.add_argument(
        "--only", type=re.compile, default="", metavar="REGEX", help="run checks that match"
    )
    options.add_argument("--out", type=Path, default=Path("runs/gpu.jsonl"))
    options.add_argument("--models", type=Path, default=Path("runs/benchmarks"))
    options.add_argument("--seconds", type=float, default=SECONDS, help="time limit of each block")
    given = options.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    setting = Setting(device, given.tiny, given.models.resolve())
    about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    about |= describe(torch.get_num_threads(), given.device) | {"versions": versions()}
    keep([{"block": "machine", **about}], given.out)
    for name in given.blocks:
        block = importlib.import_module(f"benchmarks.gpu.{name}").checks
        keep(run(name, block, setting, given.seconds, given.only), given.out)


if __name__ == "__main__":
    main()
