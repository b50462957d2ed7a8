"""Run every benchmark in turn, and write the results page.

    python -m benchmarks [--quick] [--nanogpt CHECKOUT] [--data tinyshakespeare.txt]

Each benchmark is a separate process. Its result is saved as soon as it ends. If one fails, its name
is printed and the others still run.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.harness.command import checkout_of_nanogpt


def main() -> int:
    """Run all benchmarks; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--nanogpt", type=checkout_of_nanogpt, metavar="CHECKOUT", help="a checkout, for training"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="a text file to encode")
    options = parser.parse_args()
    further = {
        "train": ["--nanogpt", str(options.nanogpt)] if options.nanogpt else [],
        "tokenize": ["--data", str(options.data)] if options.data else [],
    }
    quick = ["--quick"] if options.quick else []
    failed = []
    for name in report.TITLES:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--save", *quick]
        if subprocess.run([*command, *further.get(name, [])], check=False).returncode:
            failed.append(name)
    report.main()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
