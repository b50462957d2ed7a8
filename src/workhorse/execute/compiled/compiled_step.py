"""Compiled decoding: a program for the step that adds a token, or checks guesses, in each row.

At a batch of one, the Python around each layer costs as much as its arithmetic. The step is traced
once into a single program of fused loops and gemms, whose shapes do not depend on how many tokens
the cache holds. The program is kept on disk without the weights, so a model is compiled once on a
machine and later processes load it.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import workhorse.execute
import workhorse.native
import workhorse.nn
import workhorse.transforms
from workhorse.devices.instructions import used
from workhorse.devices.names import cache_folder, name_of
from workhorse.execute.compiled.fixed_step import FixedStepDecoder, Variant, check_fixed, fixed_step
from workhorse.execute.compiled.program_folder import ProgramFolder
from workhorse.native.build import sources_digest
from workhorse.nn import Decoder
from workhorse.nn.cache.fixed import CacheTensors
from workhorse.transforms.record import transforms_of
from workhorse.transforms.replace import become

if TYPE_CHECKING:
    from workhorse.execute.compiled.step_compiler import Program

log = logging.getLogger(__name__)


def compile_steps(decoder: Decoder, folder: Path | None = None) -> "CompiledDecoder":
    """A decoder that runs a compiled program when it adds tokens to a `PagedView`.

    These are the steps of one token per row, and of a token and guesses, as many as the cache can
    take back. Prompts and everything else run as before. The first step of a variant waits
    until its program is compiled or read from disk.

    Args:
        decoder: in evaluation mode; its weights may change afterwards, its modules may not. What
            is returned takes its place.
        folder: for the programs; None: in the user's cache folder.

    Raises:
        WorkhorseError: steps differ in shape or constants, because of a mixture of experts or of
            angles that depend on the text's length. At the first step: the compiler cannot
            translate it.
    """
    check_fixed(decoder, "compiled")
    kept = ProgramFolder(folder or cache_folder() / "programs")
    return become(decoder, CompiledDecoder, folder=kept, programs={})


class CompiledDecoder(FixedStepDecoder):
    """A decoder whose steps are programs; see `compile_steps`."""

    folder: ProgramFolder
    programs: dict[Variant, "Program"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the programs: the compiler pickles the decoder for each."""
        return vars(self) | {"programs": {}}

    def fixed_step(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        tokens = tokens.clone(memory_format=torch.contiguous_format)  # strides are checked
        program = self.programs.get(variant) or self._program(variant, tokens, tensors)
        logits = program(tokens, tensors)
        self.programs[variant] = program
        return logits

    def _program(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> "Program":
        """The program from disk, or compiled and kept there."""
        from workhorse.execute.compiled.step_compiler import Program

        name = self._fingerprint(variant)
        known = {"decoder": self}
        if file := self.folder.open(name):
            with file:
                try:
                    return Program.read(file, known)
                except Exception as error:  # it can always be compiled again
                    path = self.folder.path / name
                    log.warning("%s cannot be used and is made again: %s", path, error)
        program = compile_step(self, variant, tokens, tensors)
        self.folder.keep(name, lambda path: program.write(path, known))
        return program

    def _fingerprint(self, variant: Variant) -> str:
        """A digest of everything that the program depends on, which names its file."""
        state = (*self.named_parameters(), *self.named_buffers())
        facts = (
            self.config.to_dict(),
            repr(self),
            [(name, str(t.dtype), str(t.device), tuple(t.shape)) for name, t in state],
            (variant, torch.get_num_threads(), torch.__version__),
            (torch.backends.cpu.get_cpu_capability(), name_of(state[0][1].device)),
            (used(), sources_digest(), repr(transforms_of(self))),
            [source.read_text() for source in _sources()],
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def compile_step(
    decoder: Decoder, variant: Variant, tokens: Tensor, tensors: CacheTensors
) -> "Program":
    """Compile a step for caches of any length, and any number of rows or tokens if several.

    Args:
        decoder: to compile the step of.
        variant: of the step.
        tokens: (batch, seq), an example.
        tensors: of the cache, an example.
    """

    def step(tokens: Tensor, tensors: CacheTensors) -> Tensor:
        return fixed_step(decoder, variant, tokens, tensors)

    batch = [0] if variant.batched else []
    varying = (
        (tokens, [*batch, 1] if variant.guessed else batch),
        (tensors.lengths, batch),
        *((table, [*batch, 1]) for table in tensors.tables),
        *((stored, [1]) for stored in (*tensors.keys, *tensors.values)),
    )
    from workhorse.execute.compiled.step_compiler import compile_program

    return compile_program(step, (tokens, tensors), varying)


def _sources() -> Iterator[Path]:
    """The Python files that a program depends on; see `sources_digest` for native operators."""
    for package in (workhorse.execute, workhorse.native, workhorse.nn, workhorse.transforms):
        yield from sorted(Path(str(package.__file__)).parent.rglob("*.py"))
