"""Errors of bfloat16 relative to float32, ours compared with transformers' on the same weights.

The weights are rounded to bfloat16 first, so only the computation contributes errors. If rounding
makes a router choose another expert, the logits of that token and of later tokens say nothing about
precision. These tokens are excluded on both sides, and counted.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.execute.passes import all_logits
from tests.parity.reference import VOCAB, float_buffers, quiet, randomised, their_config
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.execute.backend import Backend, backend_of
from workhorse.execute.choose import decoding_backend
from workhorse.nn import Decoder
from workhorse.nn.positions.rope import RopeConfig

ROWS, PARTS = 45, (14, *[1] * 7)
SEQ = sum(PARTS)
"""Number of sequences (`ROWS`), their length, and the lengths of the chunks through a cache."""
FEW = 9
"""Batch size with a cache: small batches use the native matmuls."""
CHOICES = (torch.ops.aten.topk.default, torch.ops.aten.max.dim)
"""Operators with which routers choose experts."""

Outcome = tuple[Tensor, list[Tensor]]
"""Logits, and the sorted ids of the chosen experts in each layer, `(rows, seq, any)`."""


@dataclass(frozen=True)
class Rounding:
    """Errors of bfloat16, summed over tokens.

    Attributes:
        ours: squared differences of our bfloat16 logits from our float32 logits.
        theirs: squared differences of transformers' logits.
        scale: squared float32 logits.
        kept: number of tokens with the same experts as in float32, on both sides.
        tokens: number of all tokens.
    """

    ours: float
    theirs: float
    scale: float
    kept: int
    tokens: int

    @property
    def ratio(self) -> float:
        """Our root mean square error divided by theirs."""
        return (self.ours / self.theirs) ** 0.5

    def __add__(self, other: "Rounding") -> "Rounding":
        names = [field.name for field in fields(self)]
        return Rounding(*(getattr(self, name) + getattr(other, name) for name in names))


@torch.no_grad()
def measure(
    model_type: str, options: dict[str, Any], seed: int = 0, *, native: bool = False
) -> tuple[Rounding, Rounding | None]:
    """Measure the errors of both implementations on a random model.

    Args:
        model_type: model type in transformers.
        options: shape of the model, as fields of its config.
        seed: seed of weights and tokens.
        native: True to also measure decoding with a cache and native operators.

    Returns:
        The errors of a plain forward pass, and of decoding. The latter is None if it is not
        measured, or if RoPE angles depend on the length.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (ROWS, SEQ), generator=generator)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        made = hf.AutoModelForCausalLM.from_config(their_config(model_type, options))
        _rounded(randomised(made, seed)).save_pretrained(folder)
        theirs, ours = [], []
        for dtype in (torch.float32, torch.bfloat16):
            model = hf.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, experts_implementation="eager"
            ).eval()
            theirs.append(_watched(_their_logits(model), tokens))
            decoder = HuggingFaceDirectory(Path(folder)).load_decoder(dtype=dtype)
            ours.append(_watched(decoder, tokens))
        plain = _errors(ours, theirs)
        if not native or _depends_on_length(decoder):
            return plain, None
        native_backend = decoding_backend(decoder, wait=True)
        return plain, _errors((ours[0], _decoded(native_backend, tokens)), theirs)


def _rounded(model: nn.Module) -> nn.Module:
    for _, tensor in (*model.named_parameters(), *float_buffers(model)):
        tensor.copy_(tensor.bfloat16())
    return model


def _their_logits(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(tokens, use_cache=False).logits


def _depends_on_length(decoder: Decoder) -> bool:
    positions = (block.attention.position for block in decoder.config.blocks.values())
    return any(isinstance(one, RopeConfig) and one.depends_on_length for one in positions)


def _decoded(model: Decoder | Backend, tokens: Tensor) -> Outcome:
    """Run a prompt and then single tokens through a cache, in batches of `FEW`."""
    outcomes = []
    for rows in tokens.split(FEW):
        cache = backend_of(model).decoder.new_cache(len(rows), SEQ)
        parts = [
            _watched(lambda part, cache=cache: all_logits(model, part, cache), part)
            for part in rows.split(PARTS, dim=1)
        ]
        outcomes.append(_joined(parts, dim=1))
    return _joined(outcomes, dim=0)


def _joined(outcomes: Sequence[Outcome], dim: int) -> Outcome:
    logits, chosen = zip(*outcomes, strict=True)
    layers = zip(*chosen, strict=True)
    return torch.cat(logits, dim), [torch.cat(layer, dim) for layer in layers]


class Choices(TorchDispatchMode):
    """Records the chosen experts of each of `rows × seq` tokens."""

    def __init__(self, rows: int, seq: int) -> None:
        super().__init__()
        self.shape = (rows, seq, -1)
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CHOICES and result[1].numel() % (self.shape[0] * self.shape[1]) == 0:
            self.seen.append(result[1].reshape(self.shape).sort(dim=-1).values)
        return result


def _watched(forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Outcome:
    with Choices(*tokens.shape) as choices:
        logits = forward(tokens)
    return logits, choices.seen


def _errors(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> Rounding:
    """Compare the float32 and bfloat16 outcomes of each implementation."""
    kept = _agreed(*ours) & _agreed(*theirs)
    mine, my_low, exact, low = (logits[kept].double() for logits, _ in (*ours, *theirs))
    return Rounding(
        ours=(my_low - mine).square().sum().item(),
        theirs=(low - exact).square().sum().item(),
        scale=exact.square().sum().item(),
        kept=int(kept.sum()),
        tokens=kept.numel(),
    )


def _agreed(exact: Outcome, low: Outcome) -> Tensor:
    """Mask of tokens for which they and all earlier tokens have the same experts in all layers."""
    same = torch.ones(exact[0].shape[:2], dtype=torch.bool)
    for one, other in zip(exact[1], low[1], strict=True):
        same &= (one == other).all(dim=-1)
    return same.cumprod(dim=1).bool()
