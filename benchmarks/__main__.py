"""Every benchmark, one after the other, and the page that they fill.

    python -m benchmarks [--quick] [--nanogpt CHECKOUT] [--data tinyshakespeare.txt]

Each is a process of its own. What ends is kept at once; one that fails is named, and the others go
on.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.harness.command import checkout_of_nanogpt


def main() -> int:
    """Run them; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--nanogpt", type=checkout_of_nanogpt, metavar="CHECKOUT", help="for training"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="a text to encode")
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
