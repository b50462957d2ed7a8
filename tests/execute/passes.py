"""Passes of a decoder, or of a backend, over a batch of sequences in a cache."""

from pathlib import Path

from torch import Tensor

from workhorse.execute.backend import Backend, ModuleBackend, backend_of
from workhorse.execute.compiled.compiled_step import CompiledStep
from workhorse.execute.compiled.fixed_step import FixedStepBackend
from workhorse.nn import Decoder
from workhorse.nn.cache.paged_view import PagedView


def last_logits(model: Decoder | Backend, tokens: Tensor, cache: PagedView) -> Tensor:
    """Logits after the last token of each row, `(rows, vocab)`."""
    views = [(cache, tokens.shape[1])]
    return backend_of(model).logits(tokens.flatten(), views, [1] * len(tokens))


def all_logits(model: Decoder | Backend, tokens: Tensor, cache: PagedView) -> Tensor:
    """Logits after every token, `(rows, seq, vocab)`."""
    rows, seq = tokens.shape
    logits = backend_of(model).logits(tokens.flatten(), [(cache, seq)], [seq] * rows)
    return logits.view(rows, seq, -1)


def compiled(decoder: Decoder, folder: Path) -> FixedStepBackend:
    """A backend with compiled steps, whose programs are stored in a folder."""
    return FixedStepBackend(ModuleBackend(decoder), CompiledStep(decoder, folder), "compiled")
