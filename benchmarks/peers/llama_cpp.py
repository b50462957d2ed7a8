"""llama.cpp through llama-cpp-python's low-level calls; Python only chooses the tokens."""

from typing import Any

import llama_cpp
import numpy as np

from benchmarks.harness.models import gguf_file
from benchmarks.harness.shapes import DECODING
from benchmarks.harness.tokens import TokenClock, random_tokens
from benchmarks.harness.worker import Round

MICRO_BATCH = 512
"""llama.cpp's default number of prompt tokens per pass."""


def generate(
    *,
    shape: str,
    precision: str,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    models: str,
    repack: bool,
    threads: int,
) -> Round:
    """Rounds of greedy decoding on the CPU.

    Args:
        shape: the model's shape.
        precision: the type of its file.
        batch: number of sequences.
        prompt_tokens: number of prompt tokens per sequence.
        new_tokens: number of new tokens per sequence.
        models: the folder of stored files.
        repack: True to let llama.cpp repack the weights for the processor.
        threads: size of its thread pool.
    """
    llama_cpp.llama_backend_init()
    how = llama_cpp.llama_model_default_params()
    how.n_gpu_layers = 0
    how.use_extra_bufts = repack
    path = str(gguf_file(shape, precision, models)).encode()
    model = llama_cpp.llama_model_load_from_file(path, how)
    kept = llama_cpp.llama_context_default_params()
    kept.n_seq_max = batch
    kept.n_ctx = batch * (prompt_tokens + new_tokens + 8)
    kept.n_batch = max(2048, batch * prompt_tokens)
    kept.n_ubatch = MICRO_BATCH
    kept.n_threads = kept.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, kept)
    vocab_size = DECODING[shape].vocab_size
    rows = random_tokens(batch, prompt_tokens, vocab_size)
    prompts = llama_cpp.llama_batch_init(batch * prompt_tokens, 0, 1)
    one_each = llama_cpp.llama_batch_init(batch, 0, 1)

    def decode(request: Any) -> None:
        if code := llama_cpp.llama_decode(context, request):
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(context)

    def chosen(output: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, output)
        return int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())

    def take() -> dict[str, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        _fill(prompts, rows, first=0)
        clock = TokenClock(batch, prompt_tokens)
        decode(prompts)
        tokens = [chosen((row + 1) * prompt_tokens - 1) for row in range(batch)]
        clock.tick()
        for step in range(new_tokens - 1):
            _fill(one_each, [[token] for token in tokens], first=prompt_tokens + step)
            decode(one_each)
            tokens = [chosen(row) for row in range(batch)]
            clock.tick()
        return clock.rates(new_tokens)

    take()
    return take


def _fill(request: Any, rows: list[list[int]], first: int) -> None:
    """Fill a batch with rows of tokens from position `first` on; the last of each gives logits."""
    slot = 0
    for sequence, row in enumerate(rows):
        for offset, token in enumerate(row):
            request.token[slot] = token
            request.pos[slot] = first + offset
            request.n_seq_id[slot] = 1
            request.seq_id[slot][0] = sequence
            request.logits[slot] = offset == len(row) - 1
            slot += 1
    request.n_tokens = slot
