"""Cost of design choices: the same work with one setting changed, compared with the first row.

    python -m benchmarks.choices [--work training attention decoding norms gpt2]

The measurements behind docs/claims.md: training steps of a small decoder with one choice changed,
in both dtypes; forward and backward of one attention layer with each kernel, at growing lengths;
new tokens after a long prompt, with fewer key and value heads; forward and backward of one norm;
training steps of GPT-2 with each kernel. The last two are per second of CPU time, which depends
less on other programs.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants.ours import gpt, greedy, keep_memory, step_on
from benchmarks.harness.command import main, parser
from benchmarks.harness.contest import Case
from benchmarks.harness.limits import seconds_of
from benchmarks.harness.shapes import STORED
from benchmarks.harness.tokens import random_tokens
from benchmarks.harness.worker import Contestant, Round
from workhorse.config.overrides import apply_overrides
from workhorse.generate import GenerationConfig
from workhorse.nn import AttentionConfig, Context, DecoderConfig, next_token_loss
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.norms import LayerNormConfig, RMSNormConfig

BASE: dict[str, Any] = {
    "vocab_size": 4096,
    "max_seq_len": 2048,
    "d_model": 256,
    "n_layers": 4,
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm"},
            "attention": {"kind": "attention", "n_heads": 8, "position": {"kind": "rope"}},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 704, "activation": "silu"},
        }
    },
    "final_norm": {"kind": "rms_norm"},
    "head": {"tied": True},
}
BLOCK = "blocks.main"
POSITION, NORM = f"{BLOCK}.attention.position", f"{BLOCK}.norm"
BIASES = ("attention.qkv_bias", "attention.out_bias", "feed_forward.bias")
CHOICES: dict[str, list[str]] = {
    "RMSNorm, RoPE, no biases": [],
    "LayerNorm": [f"{NORM}={{kind: layer_norm}}", "final_norm={kind: layer_norm}"],
    "biases": [f"{BLOCK}.{key}=true" for key in BIASES],
    "ALiBi": [f"{POSITION}={{kind: alibi}}"],
    "no positions": [f"{POSITION}={{kind: none}}"],
    "parallel block": [f"{BLOCK}.kind=parallel"],
    "multi-query": [f"{BLOCK}.attention.n_kv_heads=1", f"{BLOCK}.feed_forward.d_ff=848"],
}
"""Settings that change the base; parameters saved on keys and values go to the feed-forward."""
ROUNDING = {
    "LayerNorm in bfloat16": [f"{NORM}={{kind: layer_norm, precision: low}}"],
    "LayerNorm in float32": [f"{NORM}={{kind: layer_norm, precision: float32}}"],
}
HEADS = {"multi-head": 8, "grouped-query": 2, "multi-query": 1}
LENGTHS = (256, 512, 1024, 2048)
ROWS, SEQ, STEPS = 8, 256, 2
WIDTH, N_HEADS = 512, 8
"""Sizes of the attention layer that is timed separately."""
PROMPT, NEW_TOKENS = 1900, 100
WORK = ("training", "attention", "decoding", "norms", "gpt2")
NORMS: dict[str, LayerNormConfig | RMSNormConfig] = {
    "RMSNorm": RMSNormConfig(),
    "LayerNorm": LayerNormConfig(),
}
KERNELS: dict[str, dict[str, str]] = {
    "sdpa, native": {"kernel": "sdpa", "execution": "native"},
    "sdpa, reference": {"kernel": "sdpa", "execution": "reference"},
    "eager, reference": {"kernel": "eager", "execution": "reference"},
}
"""How a training step of GPT-2 is computed."""
NORM_WIDTH, NORM_ROWS = 768, 2048


def config(settings: list[str]) -> DecoderConfig:
    """The base config with settings applied."""
    kept = apply_overrides(BASE, settings, keep=lambda _place, section, _kind: section)
    return DecoderConfig.from_dict(kept)


def training(*, settings: list[str], dtype: str, threads: int) -> Round:
    """Rounds of training steps, as in `workhorse train`; they return `tokens` per second."""
    from workhorse.train.recipe.training import TrainConfig
    from workhorse.train.step.build import build_step

    torch.set_num_threads(threads)
    device = torch.device("cpu")
    keep_memory(device)
    given: dict[str, Any] = {"steps": 1_000_000, "batch_size": ROWS, "seq_len": SEQ, "dtype": dtype}
    built = build_step(config(settings).build(), TrainConfig.from_dict(given), device)
    step = step_on(built, *_rows())

    def steps() -> None:
        for _ in range(STEPS):
            step()

    steps()
    return lambda: {"tokens": STEPS * ROWS * SEQ / seconds_of(steps, "cpu")}


def autocast(*, settings: list[str], threads: int) -> Round:
    """Rounds of forward and backward with float32 weights in autocast; `tokens` per second.

    Only there does a norm have a choice of precision; with bfloat16 weights all norms are equal.
    """
    torch.set_num_threads(threads)
    decoder, (tokens, targets) = config(settings).build(), _rows()

    def both() -> None:
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = next_token_loss(decoder(tokens), targets)
            loss.backward()

    both()
    return lambda: {"tokens": STEPS * ROWS * SEQ / seconds_of(both, "cpu")}


def _rows() -> tuple[Tensor, Tensor]:
    """Random tokens and the next token of each, `(ROWS, SEQ)`."""
    tokens = torch.tensor(random_tokens(ROWS, SEQ + 1, BASE["vocab_size"]))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def attention(*, kernel: KernelName, length: int, threads: int) -> Round:
    """Rounds of forward and backward of one float32 attention layer; `tokens` per second."""
    torch.set_num_threads(threads)
    layer = AttentionConfig(n_heads=N_HEADS).build(WIDTH, 0, kernel)
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    context = Context(1, length, torch.device("cpu"))
    passes = max(LENGTHS) // length

    def both() -> None:
        for _ in range(passes):
            layer(x, context).sum().backward()

    both()
    return lambda: {"tokens": passes * length / seconds_of(both, "cpu")}


def decoding(*, n_kv_heads: int, threads: int) -> Round:
    """Rounds of generating from eight prompts of `PROMPT` tokens; new tokens per second."""
    torch.set_num_threads(threads)
    decoder = config([f"{BLOCK}.attention.n_kv_heads={n_kv_heads}"]).build(dtype=torch.bfloat16)
    decoder.eval()
    prompts = random_tokens(ROWS, PROMPT, BASE["vocab_size"])
    asked = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0, stop_tokens=())

    return greedy(decoder, prompts, asked)


def norm(*, name: str, dtype: str, threads: int) -> Round:
    """Rounds of forward and backward of one norm; `tokens` (rows) per second of CPU time."""
    torch.set_num_threads(threads)
    kind: torch.dtype = getattr(torch, dtype)
    layer = NORMS[name].build(NORM_WIDTH).to(kind)
    x = torch.randn(NORM_ROWS, NORM_WIDTH, dtype=kind, requires_grad=True)
    slope = torch.randn_like(x)
    passes = 40

    def both() -> None:
        for _ in range(passes):
            layer(x).backward(slope)

    both()
    return lambda: {"tokens": passes * NORM_ROWS / _cpu_seconds(both)}


def gpt2(*, settings: dict[str, str], dtype: str, threads: int) -> Round:
    """Rounds of a training step of GPT-2 with a row of 1,024; `tokens` per second of CPU time."""
    from workhorse.train.recipe.training import TrainConfig
    from workhorse.train.step.build import build_step

    torch.set_num_threads(threads)
    device, shape = torch.device("cpu"), STORED["gpt2"]
    keep_memory(device)
    given: dict[str, Any] = {"steps": 1_000_000, "batch_size": 1, "seq_len": shape.context}
    asked = TrainConfig.from_dict({**given, "dtype": dtype, **settings})
    built = build_step(gpt(shape).build(asked.kernel), asked, device)
    tokens = torch.tensor(random_tokens(1, shape.context + 1, shape.vocab_size))
    step = step_on(built, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    step()
    return lambda: {"tokens": shape.context / _cpu_seconds(step)}


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The cases of the selected kinds of work."""
    if "training" in options.work:
        for dtype in ("float32", "bfloat16"):
            rows = [
                Contestant(name, "benchmarks.choices:training", {"settings": asked, "dtype": dtype})
                for name, asked in CHOICES.items()
            ]
            yield Case(f"training {dtype}", "tokens", "tokens/s", tuple(rows))
        norms = [
            Contestant(name, "benchmarks.choices:autocast", {"settings": asked})
            for name, asked in ROUNDING.items()
        ]
        yield Case("norms in autocast", "tokens", "tokens/s", tuple(norms))
    if "attention" in options.work:
        for length in LENGTHS:
            kernels = [
                Contestant(
                    kernel, "benchmarks.choices:attention", {"kernel": kernel, "length": length}
                )
                for kernel in ("sdpa", "eager")
            ]
            yield Case(f"attention {length}", "tokens", "tokens/s", tuple(kernels))
    if "decoding" in options.work:
        heads = [
            Contestant(name, "benchmarks.choices:decoding", {"n_kv_heads": count})
            for name, count in HEADS.items()
        ]
        yield Case("decoding", "decode", "tokens/s", tuple(heads))
    for dtype in ("float32", "bfloat16"):
        if "norms" in options.work:
            rows = [
                Contestant(name, "benchmarks.choices:norm", {"name": name, "dtype": dtype})
                for name in NORMS
            ]
            yield Case(f"norm {dtype}", "tokens", "rows/CPU-s", tuple(rows))
    if "gpt2" in options.work:
        kinds = [
            Contestant(name, "benchmarks.choices:gpt2", {"settings": asked, "dtype": "float32"})
            for name, asked in KERNELS.items()
        ]
        yield Case("gpt2 step float32", "tokens", "tokens/CPU-s", tuple(kinds))


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = parser(__doc__ or "")
    made.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    return made


if __name__ == "__main__":
    main("choices", cases, options().parse_args())
