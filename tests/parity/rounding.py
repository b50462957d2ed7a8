"""How far bfloat16 is from float32: ours beside transformers', on the same weights.

The weights are rounded to bfloat16 first, so the errors are those of computing alone. Where
rounding tips a router to another expert, the logits of that token, and of those after it that see
it, say nothing of precision; they are left out, on both sides, and counted.
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

from tests.parity.reference import VOCAB, float_buffers, quiet, randomised, their_config
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.execute.choose import decoding_body
from workhorse.nn import Decoder
from workhorse.nn.positions.rope import RopeConfig

ROWS, PARTS = 45, (14, *[1] * 7)
SEQ = sum(PARTS)
"""Texts, and the lengths of the pieces that go through a cache."""
FEW = 9
"""Rows at once with a cache: for few numbers the products are the native operators'."""
CHOICES = (torch.ops.aten.topk.default, torch.ops.aten.max.dim)
"""What routers choose experts with."""

Outcome = tuple[Tensor, list[Tensor]]
"""Logits, and who was chosen in each layer, `(rows, seq, any)` sorted numbers."""


@dataclass(frozen=True)
class Rounding:
    """Errors of bfloat16, added up over tokens.

    Attributes:
        ours: squared differences of our logits from float32's.
        theirs: of transformers'.
        scale: squares of float32's logits.
        kept: tokens whose experts are float32's, on both sides.
        tokens: all.
    """

    ours: float
    theirs: float
    scale: float
    kept: int
    tokens: int

    @property
    def ratio(self) -> float:
        """Our root mean square error over theirs."""
        return (self.ours / self.theirs) ** 0.5

    def __add__(self, other: "Rounding") -> "Rounding":
        names = [field.name for field in fields(self)]
        return Rounding(*(getattr(self, name) + getattr(other, name) for name in names))


@torch.no_grad()
def measure(
    model_type: str, options: dict[str, Any], seed: int = 0, *, native: bool = False
) -> tuple[Rounding, Rounding | None]:
    """Both models' errors on a random model of that shape.

    Args:
        model_type: whose.
        options: its shape.
        seed: of weights and texts.
        native: measure decoding with a cache and native operators too.

    Returns:
        The errors of a plain forward; those of decoding, None where angles depend on the length.
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
        native_body = decoding_body(decoder, wait=True).decoder
        return plain, _errors((ours[0], _decoded(native_body, tokens)), theirs)


def _rounded(model: nn.Module) -> nn.Module:
    for _, tensor in (*model.named_parameters(), *float_buffers(model)):
        tensor.copy_(tensor.bfloat16())
    return model


def _their_logits(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(tokens, use_cache=False).logits


def _depends_on_length(decoder: Decoder) -> bool:
    positions = (block.attention.position for block in decoder.config.blocks.values())
    return any(isinstance(one, RopeConfig) and one.depends_on_length for one in positions)


def _decoded(decoder: Decoder, tokens: Tensor) -> Outcome:
    """A prompt and then token by token, a few rows at once."""
    outcomes = []
    for rows in tokens.split(FEW):
        cache = decoder.new_cache(len(rows), SEQ)
        parts = [
            _watched(lambda part, cache=cache: decoder(part, cache=cache), part)
            for part in rows.split(PARTS, dim=1)
        ]
        outcomes.append(_joined(parts, dim=1))
    return _joined(outcomes, dim=0)


def _joined(outcomes: Sequence[Outcome], dim: int) -> Outcome:
    logits, chosen = zip(*outcomes, strict=True)
    layers = zip(*chosen, strict=True)
    return torch.cat(logits, dim), [torch.cat(layer, dim) for layer in layers]


class Choices(TorchDispatchMode):
    """Remembers what was chosen for each of `rows × seq` tokens."""

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
    """Of float32 and bfloat16 of each."""
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
    """Tokens that have, with all before them, the same experts in every layer."""
    same = torch.ones(exact[0].shape[:2], dtype=torch.bool)
    for one, other in zip(exact[1], low[1], strict=True):
        same &= (one == other).all(dim=-1)
    return same.cumprod(dim=1).bool()
