"""Decoding compiled: one program for the step of one more token in each row.

At a batch of one the Python around each layer costs as much as its arithmetic. The step is traced
once into a single program of fused loops and matrix products, whose shapes do not depend on how
much the cache holds. The program is kept on disk without the weights, so a model is compiled once
on a machine, and a later process loads it.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import workhorse.nn
from workhorse.devices import cache_folder
from workhorse.errors import WorkhorseError
from workhorse.nn import Cache, Decoder
from workhorse.nn.fixed_cache import CacheTensors, FixedCache, Layout, layout_of, tensors_of
from workhorse.nn.moe import MixtureOfExperts
from workhorse.nn.self_attention import Rotation

log = logging.getLogger(__name__)
OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
"""Of the compiler: what was compiled for these shapes need not look at them at every token."""


def compile_steps(decoder: Decoder, folder: Path | None = None) -> "CompiledSteps":
    """Let a decoder's `next_logits` run compiled where it can: one token a row, with a cache.

    Prompts and everything else run as before. The first step of a kind waits for the compiler, or
    for the program to be read.

    Args:
        decoder: in evaluation mode; its weights may change afterwards, its modules may not.
        folder: where programs are kept; the user's cache folder where not given.

    Raises:
        WorkhorseError: no step is like the next, because angles change as the text grows or
            experts are given shares of the tokens. When a step runs: the compiler cannot translate
            it.
    """
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
    steps = CompiledSteps(decoder, folder or cache_folder() / "programs")
    decoder.next_logits = steps
    return steps


class CompiledSteps:
    """In the place of `Decoder.next_logits`; see `compile_steps`."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder = decoder
        self.folder = folder
        self.programs: dict[tuple[Layout, bool], Any] = {}

    def __call__(
        self, tokens: Tensor, *, positions: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        one_more = tokens.shape[1] == 1 and positions is None and not torch.is_grad_enabled()
        if cache is None or not cache.length or not one_more:
            return Decoder.next_logits(self.decoder, tokens, positions=positions, cache=cache)
        cache.check_room(1)
        layout, tensors = layout_of(cache), tensors_of(cache)
        tokens = tokens.clone(memory_format=torch.contiguous_format)  # strides are checked
        kind = (layout, len(tokens) > 1)
        if kind in self.programs:
            logits = self.programs[kind](tokens, tensors)
        else:
            program = self._program(layout, tokens, tensors)
            logits = program(tokens, tensors)
            # It fits caches of this kind, all of whose tensors are made alike; to look again at
            # every token costs a twentieth of a small model's step.
            program.disable_guard_check()
            self.programs[kind] = program
        cache.advance()
        return logits

    def _program(self, layout: Layout, tokens: Tensor, tensors: CacheTensors) -> Any:
        """From disk, or compiled and put there."""
        path = self.folder / self._fingerprint(layout, len(tokens) > 1)
        known = {"decoder": self.decoder}
        if path.exists():
            try:
                with path.open("rb") as file:
                    return torch.compiler.load_compiled_function(file, external_data=known)
            except Exception as error:  # whatever is wrong with it, it can be made again
                log.warning("%s cannot be used and is made again: %s", path, error)
        program = compile_step(self.decoder, layout, tokens, tensors)
        temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            program.save_compiled_function(temporary, external_data=known)
            temporary.replace(path)
        except OSError as error:
            log.warning("the compiled step is not kept: %s", error)
        return program

    def _fingerprint(self, layout: Layout, batched: bool) -> str:
        """A name of everything that the program depends on."""
        state = (*self.decoder.named_parameters(), *self.decoder.named_buffers())
        facts = (
            self.decoder.config.to_dict(),
            repr(self.decoder),
            [(name, str(t.dtype), str(t.device), tuple(t.shape)) for name, t in state],
            (layout, batched, torch.get_num_threads(), torch.__version__),
            torch.backends.cpu.get_cpu_capability(),
            [source.read_text() for source in _sources()],
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def compile_step(decoder: Decoder, layout: Layout, tokens: Tensor, tensors: CacheTensors) -> Any:
    """The program for caches of that layout, of any capacity, and with several rows any number.

    Args:
        decoder: whose step it is.
        layout: of the cache.
        tokens: (batch, 1), an example.
        tensors: of the cache, an example.

    Raises:
        WorkhorseError: the compiler cannot translate it.
    """

    def step(tokens: Tensor, tensors: CacheTensors) -> Tensor:
        cache = FixedCache(layout, tensors)
        return Decoder.next_logits(decoder, tokens, cache=cache)

    batch = [0] if len(tokens) > 1 else []
    for tensor, varying in (
        (tokens, batch),
        (tensors.lengths, batch),
        *((held, [*batch, 1]) for held in tensors.held),
        *((shown, [0]) for shown in tensors.shown),
        *((stored, [*batch, 2]) for stored in (*tensors.keys, *tensors.values)),
    ):
        for dim in varying:
            torch._dynamo.mark_dynamic(tensor, dim)
    try:
        # Numbers of the config are constants. Traced as variables they make the compiler begin
        # anew, which it does by an exception that `aot_compile` lets through (PyTorch 2.13).
        with torch._dynamo.config.patch(specialize_float=True):
            program = torch.compile(step, fullgraph=True, options=OPTIONS)
            return program.aot_compile(((tokens, tensors), {}))
    except RuntimeError as error:  # no C++ compiler above all
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise WorkhorseError(
            f"the compiler cannot do this model's step ({reason}); leave compile out"
        ) from error


def _sources() -> list[Path]:
    """The code that a program is made of."""
    return [Path(__file__), *sorted(Path(workhorse.nn.__file__).parent.glob("*.py"))]
