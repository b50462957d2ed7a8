"""What guesses gain or cost: speed of an engine with `speculate`, as a multiple of that without.

    python -m benchmarks.guesses [--model PATH] [--speculate 4] [--sequences 1 4 16] [--new 256]

Prompts are the first 128 tokens of modules of the standard library; completions are greedy or
sampled, and equal with and without guesses. Times are CPU seconds of one thread, since other
programs affect these little. The figures are medians of rounds. Without `--model`, the model has
the shape 25m and random weights: its greedy completions soon repeat themselves, its samples never.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from benchmarks.serving import PROMPT, folder
from workhorse.devices.names import use_threads
from workhorse.generate import Engine, GenerationConfig
from workhorse.model.load import load
from workhorse.model.model import Model


def run(
    model: Model, prompts: list[list[int]], config: GenerationConfig
) -> tuple[float, list[list[int]], int, int]:
    """Return CPU seconds, the completions, and the numbers of proposed and accepted tokens."""
    engine = Engine(model.backend, max_sequences=len(prompts), speculate=config.speculate)
    found: list[list[int]] = [[] for _ in prompts]
    proposed = accepted = 0
    for prompt in prompts:
        engine.add(prompt, config)
    started = 0.0
    while not engine.is_idle:
        for delta in engine.step():
            found[delta.index].append(delta.token)
            proposed, accepted = proposed + delta.proposed, accepted + delta.accepted
        started = started or time.process_time()  # without the prompts
    return time.process_time() - started, found, proposed, accepted


def main() -> None:
    """Measure, and print a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: the shape 25m with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--speculate", type=int, default=4)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    use_threads(1)
    path = options.model or folder("25m", options.models)
    model = load(str(path), device="cpu", dtype=options.dtype, exact=True)
    files = sorted(Path(random.__file__).parent.glob("*.py"))
    texts = [model.encode(file.read_text(errors="ignore")[:8000])[:PROMPT] for file in files]
    texts = [text for text in texts if len(text) == PROMPT]
    for temperature in (0, 1):
        for count in options.sequences:
            config = GenerationConfig(
                temperature=temperature,
                max_new_tokens=options.new,
                stop_tokens=(),
                seed=0,
                exact=model.backend.is_invariant,
            )
            gains: list[float] = []
            for _ in range(options.rounds):
                plain, expected, _, _ = run(model, texts[:count], config)
                guessing = config.replace(speculate=options.speculate)
                seconds, found, proposed, accepted = run(model, texts[:count], guessing)
                if found != expected:
                    print("the completions differ")
                gains.append(plain / seconds)
            tokens = count * options.new
            print(
                f"temperature {temperature}, {count:2} sequences: {statistics.median(gains):.2f} "
                f"({min(gains):.2f} to {max(gains):.2f}) times as fast; per token "
                f"{proposed / tokens:.2f} guesses, {accepted / tokens:.2f} accepted",
                flush=True,
            )


if __name__ == "__main__":
    main()
