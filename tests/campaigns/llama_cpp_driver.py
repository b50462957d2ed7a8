"""Runs llama.cpp on GGUF files, in a separate process because it aborts the process on failure.

    python -m tests.campaigns.llama_cpp_driver REQUEST.json

The request is a list of jobs with a `file` and an `out` each. A job with `tokens`, several lists of
ids of equal length, writes their logits to the `.npy` file `out`. A job with `texts` writes their
ids to the JSON file `out`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

F32 = 0
"""Type of the key-value cache."""
CONTEXT = 256


def _plain_kernels() -> None:
    """Disable weights repacked for a CPU: AMX kernels crashed in a virtual machine."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def params() -> Any:
        chosen = defaults()
        chosen.use_extra_bufts = False
        return chosen

    llama_cpp.llama_cpp.llama_model_default_params = params


def run(job: dict[str, Any]) -> None:
    """Run one job."""
    tokens = job.get("tokens")
    llama = llama_cpp.Llama(
        job["file"],
        n_ctx=CONTEXT,
        n_batch=CONTEXT,
        n_threads=1,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        vocab_only=tokens is None,
        verbose=False,
    )
    if tokens is None:
        texts = [text.encode() for text in job["texts"]]
        ids = [llama.tokenize(text, add_bos=False, special=False) for text in texts]
        Path(job["out"]).write_text(json.dumps(ids))
    else:
        np.save(job["out"], np.stack([logits(llama, ids) for ids in tokens]))
    llama.close()


def logits(llama: llama_cpp.Llama, ids: list[int]) -> np.ndarray:
    """Logits of one sequence, `(seq, vocab)`."""
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)])


if __name__ == "__main__":
    _plain_kernels()
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
