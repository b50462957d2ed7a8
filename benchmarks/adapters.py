"""Adapters in an engine: CPU time of 16 requests that use 0, 1, 2 or 4 adapters of one base.

    python -m benchmarks.adapters [--shape 160m] [--precision bfloat16] [--requests 16]

The adapters have rank 16, on all linear layers. In each round, the requests (a prompt of 128 random
tokens, 64 new tokens, as in `benchmarks.serving`) run once for each number of adapters, which they
share equally. With 0 adapters they use the base. One thread runs them, and its CPU time is
measured, because it depends little on other programs. The first round is not counted, and figures
are medians.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.harness.shapes import DECODING
from benchmarks.serving import NEW, PROMPT, VOCAB, folder

IN_USE = (0, 1, 2, 4)
RANK = 16


class Timed(NamedTuple):
    """CPU seconds of all requests, of the prompts, and of a step after them."""

    whole: float
    prompts: float
    step: float


def adapter(model: Path, number: int) -> Path:
    """An adapter with random weights as a PEFT directory; made if it does not exist."""
    path = model.with_name(f"{model.name}-adapter-{number}")
    if path.exists():
        return path
    import workhorse
    from workhorse.checkpoints.peft import write_peft
    from workhorse.models.huggingface import family
    from workhorse.transforms.adapters import adapter_parameters, add_adapter
    from workhorse.transforms.lora import LoraConfig

    reference = workhorse.load(model, execution="reference").reference
    decoder = add_adapter(reference, LoraConfig(rank=RANK), seed=number)
    for name, parameter in adapter_parameters(decoder).items():
        if "lora_b" in name:
            parameter.data.normal_(std=0.01)
    write_peft(path, decoder, family("llama"), str(model))
    return path


def measure(engine, names: Sequence[str | None], requests: int, pick: random.Random) -> Timed:
    """Run requests that use these adapters in turn."""
    from workhorse.generate import GenerationConfig

    config = GenerationConfig(max_new_tokens=NEW, temperature=0, exact=True)
    started = time.process_time()
    for n in range(requests):
        prompt = [pick.randrange(300, VOCAB) for _ in range(PROMPT)]
        engine.add(prompt, config, adapter=names[n % len(names)])
    steps: list[float] = []
    while not engine.is_idle:
        before = time.process_time()
        engine.step()
        steps.append(time.process_time() - before)
    return Timed(time.process_time() - started, steps[0], median(steps[1:]))


def main() -> None:
    """Measure, and print a line for each number of adapters in use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=DECODING, default="160m")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantize", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    from workhorse import load
    from workhorse.devices.names import use_threads
    from workhorse.generate import Engine

    use_threads(1)
    path = folder(options.shape, options.models)
    how = {"execution": "native", "exact": True}
    model = load(path, dtype=options.precision, quantize=options.quantize, **how)
    adapters: Mapping[str, object] = {
        f"a{n}": model.with_adapter(adapter(path, n), **how).backend for n in range(max(IN_USE))
    }
    engine = Engine(
        model.backend,
        adapters=adapters,
        max_sequences=options.requests,
        max_tokens=options.requests * (PROMPT + NEW),
    )
    pick = random.Random(1)
    found: dict[int, list[Timed]] = {number: [] for number in IN_USE}
    for _ in range(options.rounds + 1):
        for number in IN_USE:
            names = list(adapters)[:number] or [None]
            found[number].append(measure(engine, names, options.requests, pick))
    tokens = options.requests * NEW
    for number, rounds in found.items():
        whole, prompts, step = (median(figures) for figures in zip(*rounds[1:], strict=True))
        print(
            f"{number} adapters: {tokens / whole:,.0f} tokens/s, prompts {prompts:.2f} s, "
            f"step {1000 * step:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
