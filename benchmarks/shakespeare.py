"""Time of a whole process to nanoGPT's validation loss on tiny Shakespeare, beside nanoGPT.

    python -m benchmarks.shakespeare --data tinyshakespeare.txt --nanogpt CHECKOUT

Ours is `workhorse train recipes/shakespeare-fast.yaml`; nanoGPT's is its published CPU recipe of
2,000 steps. Both are timed from process start to exit, in turn. nanoGPT can be run for fewer steps
(`--nanogpt-steps`). The time of its steps is then scaled to 2,000; its start is counted once.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.command import at_least_one, checkout_of_nanogpt

RECIPE = Path(__file__).parent.parent / "recipes" / "shakespeare-fast.yaml"
NANOGPT_STEPS = 2000
NANOGPT_LOSS = 1.886
"""Loss of the CPU recipe in nanoGPT's README on the whole validation split."""
NANOGPT_FLAGS = [
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=100"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
    *("--lr_decay_iters=2000", "--dropout=0.0", "--always_save_checkpoint=False"),
]


def ours(data: Path) -> tuple[float, float]:
    """Seconds of one whole run, and its validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "workhorse", "train", str(RECIPE), "--json"),
            *(f"data.corpus.path={data}", "--out", f"{folder}/run"),
        ]
        started = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - started
    return seconds, json.loads(done.stdout)["validation_loss"]


def nanogpt(checkout: Path, steps: int) -> float:
    """Seconds of nanoGPT's recipe run for `steps` steps, from start to exit."""
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *NANOGPT_FLAGS]
    command += [f"--max_iters={steps}", f"--eval_interval={steps}"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=checkout)
    return time.perf_counter() - started


def prepare_nanogpt(checkout: Path, data: Path) -> None:
    """Encode the corpus with nanoGPT's own script, which looks for `input.txt` beside itself."""
    folder = checkout / "data" / "shakespeare_char"
    (folder / "input.txt").write_bytes(data.read_bytes())
    subprocess.run([sys.executable, "prepare.py"], check=True, capture_output=True, cwd=folder)


def main() -> None:
    """Measure in turn and print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--nanogpt", type=checkout_of_nanogpt, help="a checkout of nanoGPT")
    parser.add_argument("--nanogpt-steps", type=at_least_one, default=NANOGPT_STEPS)
    parser.add_argument("--runs", type=at_least_one, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    data = arguments.data.resolve()
    if arguments.nanogpt:
        prepare_nanogpt(arguments.nanogpt, data)
    times, losses, peer = [], [], []
    for _ in range(arguments.runs):
        seconds, loss = ours(data)
        times.append(seconds)
        losses.append(loss)
        if arguments.nanogpt:
            start = nanogpt(arguments.nanogpt, 1)
            steps = nanogpt(arguments.nanogpt, 1 + arguments.nanogpt_steps) - start
            peer.append(start + steps * NANOGPT_STEPS / arguments.nanogpt_steps)
    result = {
        "seconds": statistics.median(times),
        "validation_loss": statistics.median(losses),
        "target_loss": NANOGPT_LOSS,
        "nanogpt_seconds": statistics.median(peer) if peer else None,
        "ratio": statistics.median(a / b for a, b in zip(times, peer, strict=True))
        if peer
        else None,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"workhorse  {result['seconds']:6.1f} s  validation loss {result['validation_loss']:.4f}")
    if peer:
        print(f"nanoGPT    {result['nanogpt_seconds']:6.1f} s  ratio {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
