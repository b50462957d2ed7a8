"""The state of the random generators of Python, NumPy and PyTorch."""

import base64
import random
from typing import Any, cast

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the random state of Python, NumPy and PyTorch, on the CPU and all CUDA devices."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in on_cuda],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore every random generator to a result of `random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_initialized():
        for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(saved), device)


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy accepts only 32 bits
    torch.manual_seed(seed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
