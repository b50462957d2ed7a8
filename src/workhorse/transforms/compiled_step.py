"""Decoding compiled: a program for the step of one more token in each row, and of guessed ones.

At a batch of one the Python around each layer costs as much as its arithmetic. The step is traced
once into a single program of fused loops and matrix products, whose shapes do not depend on how
much the cache holds. The program is kept on disk without the weights, so a model is compiled once
on a machine, and a later process loads it.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

import workhorse.native
import workhorse.nn
import workhorse.transforms
from workhorse.devices import cache_folder, name_of
from workhorse.errors import WorkhorseError
from workhorse.instructions import used
from workhorse.native.build import sources_digest
from workhorse.nn import Decoder
from workhorse.nn.attention.self_attention import Rotation
from workhorse.nn.cache.fixed import CacheTensors, FixedCache, Layout, layout_of, tensors_of
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.cache.view import CacheView
from workhorse.nn.experts.mixture import MixtureOfExperts
from workhorse.transforms.program_folder import ProgramFolder
from workhorse.transforms.record import check, record, transforms_of
from workhorse.transforms.replace import become

if TYPE_CHECKING:
    from workhorse.transforms.step_compiler import Program  # which imports the compiler, slowly

log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """Steps of one kind are done by one program."""

    layout: Layout
    batched: bool
    """Several rows, any number."""
    guessed: bool
    """Several tokens of each row, any number, rather than one."""


def compile_steps(decoder: Decoder, folder: Path | None = None) -> "CompiledDecoder":
    """A decoder that runs compiled where it adds a token to each row of a cache.

    That, and tokens that were guessed: no more than the cache can take back, which are checked in
    one pass. Prompts and everything else run as before. The first step of a kind waits for the
    compiler, or for the program to be read.

    Args:
        decoder: in evaluation mode; its weights may change afterwards, its modules may not. What
            is returned takes its place.
        folder: where programs are kept; the user's cache folder where not given.

    Raises:
        WorkhorseError: no step is like the next, because angles change as the text grows or
            experts are given shares of the tokens; or the decoder carries what this cannot follow.
            When a step runs: the compiler cannot translate it.
    """
    check(decoder, "compile_steps")
    if any(isinstance(part, MixtureOfExperts) for part in decoder.modules()):
        raise WorkhorseError(
            "a mixture of experts has other shapes at every token and cannot be compiled; "
            "leave compile out"
        )
    rotations = [part.rope for part in decoder.modules() if isinstance(part, Rotation)]
    if any(rope.depends_on_length for rope in rotations):
        raise WorkhorseError(
            "rope scaling dynamic_ntk and longrope depend on the text's length and cannot be "
            "compiled; leave compile out"
        )
    kept = ProgramFolder(folder or cache_folder() / "programs")
    compiled = become(decoder, CompiledDecoder, folder=kept, programs={})
    record(compiled, "compile_steps")
    return compiled


class CompiledDecoder(Decoder):
    """A decoder whose steps are programs; see `compile_steps`."""

    folder: ProgramFolder
    programs: dict[Kind, "Program"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the programs: the compiler pickles the decoder for each."""
        return vars(self) | {"programs": {}}

    def next_logits(
        self, tokens: Tensor, *, positions: Tensor | None = None, cache: CacheView | None = None
    ) -> Tensor:
        if tokens.shape[1] == 1 and positions is None and _is_step(cache, 1):
            return self._run(tokens, cache)[:, 0]
        return super().next_logits(tokens, positions=positions, cache=cache)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: CacheView | None = None,
    ) -> Tensor:
        counted = positions is None and documents is None
        if counted and _is_step(cache, tokens.shape[1]):
            return self._run(tokens, cache)
        return super().forward(tokens, positions=positions, documents=documents, cache=cache)

    def _run(self, tokens: Tensor, view: PagedView) -> Tensor:
        rows, seq = tokens.shape
        view.reserve([seq] * rows)
        kind = Kind(layout_of(view), batched=rows > 1, guessed=seq > 1)
        tensors = tensors_of(view)
        tokens = tokens.clone(memory_format=torch.contiguous_format)  # strides are checked
        program = self.programs.get(kind) or self._program(kind, tokens, tensors)
        logits = program(tokens, tensors)
        self.programs[kind] = program
        view.advance(seq)
        return logits

    def _program(self, kind: Kind, tokens: Tensor, tensors: CacheTensors) -> "Program":
        """From disk, or compiled and put there."""
        from workhorse.transforms.step_compiler import Program

        name = self._fingerprint(kind)
        known = {"decoder": self}
        if file := self.folder.open(name):
            with file:
                try:
                    return Program.read(file, known)
                except Exception as error:  # whatever is wrong with it, it can be made again
                    path = self.folder.path / name
                    log.warning("%s cannot be used and is made again: %s", path, error)
        program = compile_step(self, kind, tokens, tensors)
        self.folder.keep(name, lambda path: program.write(path, known))
        return program

    def _fingerprint(self, kind: Kind) -> str:
        """A name of everything that the program depends on."""
        state = (*self.named_parameters(), *self.named_buffers())
        facts = (
            self.config.to_dict(),
            repr(self),
            [(name, str(t.dtype), str(t.device), tuple(t.shape)) for name, t in state],
            (kind, torch.get_num_threads(), torch.__version__),
            (torch.backends.cpu.get_cpu_capability(), name_of(state[0][1].device)),
            (used(), sources_digest(), repr(transforms_of(self))),
            [source.read_text() for source in _sources()],
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _is_step(cache: CacheView | None, seq: int) -> TypeGuard[PagedView]:
    if not isinstance(cache, PagedView) or torch.is_grad_enabled():
        return False
    return seq <= cache.slack + 1 and all(text.length for text in cache.texts)


def compile_step(decoder: Decoder, kind: Kind, tokens: Tensor, tensors: CacheTensors) -> "Program":
    """The program for caches of any capacity, and for any number of what there are several of.

    Args:
        decoder: whose step it is.
        kind: of step.
        tokens: (batch, seq), an example.
        tensors: of the cache, an example.
    """

    def step(tokens: Tensor, tensors: CacheTensors) -> Tensor:
        return Decoder.forward(decoder, tokens, cache=FixedCache(kind.layout, tensors))

    batch = [0] if kind.batched else []
    varying = (
        (tokens, [*batch, 1] if kind.guessed else batch),
        (tensors.lengths, batch),
        *((table, [*batch, 1]) for table in tensors.tables),
        *((stored, [1]) for stored in (*tensors.keys, *tensors.values)),
    )
    from workhorse.transforms.step_compiler import compile_program

    return compile_program(step, (tokens, tensors), varying)


def _sources() -> Iterator[Path]:
    """The Python that a program is made of; see `sources_digest` for the operators it calls."""
    for package in (workhorse.native, workhorse.nn, workhorse.transforms):
        yield from sorted(Path(str(package.__file__)).parent.rglob("*.py"))
