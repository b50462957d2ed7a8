"""A decoder that runs a whole decoding step in one call of a native operator.

Module by module, a step makes a hundred Python calls and a hundred thread barriers. For a small
model either costs more than reading the weights. The operator runs a program of instructions in one
parallel region. The program is derived from the modules (`lower/step.py`). If a computation has
no instruction, the step runs module by module.
"""

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.execute.compiled.compiled_step import CompiledDecoder
from workhorse.execute.lower.program import Program, RotationKey
from workhorse.execute.lower.step import translate
from workhorse.execute.native_decoding.layers import DOT_ROWS_BESIDE_GEMM
from workhorse.execute.record import CannotTranslate
from workhorse.native import Operators, Steps
from workhorse.native.steps import KeptWeights
from workhorse.nn import Decoder
from workhorse.nn.cache.fixed import tensors_of
from workhorse.nn.cache.paged_view import PackedView, PagedView
from workhorse.nn.cache.view import CacheView
from workhorse.nn.embedding import batch_and_seq, look_up
from workhorse.nn.surgery import HookWatch, Members, as_subclass
from workhorse.transforms.lora import Adapted

MAX_TOKENS = 256
"""Maximum number of new tokens of a step, summed over sequences. For more, it is faster to run the
modules, whose attention computes whole blocks of scores."""


def step_natively(
    decoder: Decoder, operators: Operators, *, exact: bool = False
) -> "SteppingDecoder":
    """Return a decoder that adds a few tokens to a paged cache in one native call.

    All other passes, such as long prompts, run module by module. So do all passes while the decoder
    has hooks. If a computation has no instruction, steps run module by module, or compiled if
    `compile_steps` was applied. If weights or modules are replaced later, the decoder is translated
    again. Other changes to modules are not noticed.

    Args:
        decoder: the decoder in evaluation mode, on the CPU, after the other inference transforms.
            The returned decoder replaces it.
        operators: the native operators, including `steps`.
        exact: True to process any number of tokens in native calls, with the gemms of training, so
            that the bits of a token's logits depend only on the tokens before it, if all
            computations have an instruction (`Decoder.is_invariant`).
    """
    dtype = next(decoder.parameters()).dtype
    few = DOT_ROWS_BESIDE_GEMM.get(dtype, 0)
    # Without native gemms, PyTorch computes larger batches faster.
    most = few if operators.vectors is None else MAX_TOKENS
    if dtype == torch.bfloat16 and operators.matrix_unit is not None:  # faster from two rows on
        few, most = 1, MAX_TOKENS
    if exact:
        few, most = 0, sys.maxsize
    options = {"steps": operators.steps, "few": few, "most": most, "exact": exact}
    kind = SteppingCompiledDecoder if type(decoder) is CompiledDecoder else SteppingDecoder
    watch = HookWatch(decoder.modules())
    return as_subclass(decoder, kind, **options, angles=Angles(), watch=watch)


class Angles:
    """A cache of RoPE's cosines and sines, up to the largest position needed so far."""

    def __init__(self) -> None:
        self._tables: dict[RotationKey, tuple[Tensor, Tensor]] = {}

    def upto(self, length: int, rotations: Sequence[RotationKey]) -> list[Tensor]:
        """Return the cosines and sines of each rotation for at least `length` positions.

        Returns:
            (positions, pairs) each: the cosines of the first rotation, its sines, and so on.
        """
        return [table for rotation in rotations for table in self._upto(length, rotation)]

    def _upto(self, length: int, rotation: RotationKey) -> tuple[Tensor, Tensor]:
        known = self._tables.get(rotation)
        if known is None or len(known[0]) < length:
            positions = torch.arange(max(2 * length, 256))[None]
            cos, sin = rotation.rope.angles(positions, rotation.head_dim, length)
            dtype = rotation.dtype
            known = cos[0, 0].to(dtype).contiguous(), sin[0, 0].to(dtype).contiguous()
            self._tables[rotation] = known
        return known


class SteppingDecoder(Decoder):
    """A decoder that runs whole decoding steps in one native call; made by `step_natively`."""

    steps: Steps
    few: int
    most: int
    exact: bool
    angles: Angles
    watch: HookWatch
    translated: "Translated | None" = None

    @property
    def invariant_batch(self) -> int:
        return super().invariant_batch if self._kept_program() is None else self.few or self.most

    @property
    def is_invariant(self) -> bool:
        return self.exact and self._kept_program() is not None

    def why_not_whole(self) -> str:
        """Name of the computation that the native program cannot express.

        Steps then run module by module. Empty if a whole step is one native call.
        """
        if self._kept_program() is not None:
            return ""
        if self.watch.sees_hooks or self.translated is None:
            return "hooks"
        return self.translated.why_not

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the program: it refers to the weights of this process."""
        state: Any = super().__getstate__()
        return state | {"translated": None}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.translated = None  # PyTorch can swap parameters only without other references
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.translated = None
        return super()._apply(*args, **kwargs)

    def next_logits(
        self, tokens: Tensor, *, positions: Tensor | None = None, cache: CacheView | None = None
    ) -> Tensor:
        if positions is None and (found := self._kept_program_for(tokens, cache)):
            logits = self._step_of_batch(*found, tokens, last_only=True)
            if logits is not None:
                return logits
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
        if counted and (found := self._kept_program_for(tokens, cache)):
            logits = self._step_of_batch(*found, tokens, last_only=False)
            if logits is not None:
                return logits.view(*tokens.shape, -1)
        return super().forward(tokens, positions=positions, documents=documents, cache=cache)

    def next_logits_packed(self, tokens: Tensor, index: Sequence[int], cache: PackedView) -> Tensor:
        views = [view for view, _ in cache.parts]
        if self._takes(cache.parts) and (kept := self._kept_program()):
            counts = [seq for view, seq in cache.parts for _ in view.sequences]
            whole = PagedView(views[0].cache, [one for view in views for one in view.sequences])
            whole.reserve(counts)
            logits = self._step(
                kept, whole, tokens.flatten(), torch.tensor(counts), torch.tensor(index)
            )
            if logits is not None:
                for sequence, count in zip(whole.sequences, counts, strict=True):
                    sequence.length += count
                return logits
        return super().next_logits_packed(tokens, index, cache)

    def _kept_program_for(
        self, tokens: Tensor, cache: CacheView | None
    ) -> "tuple[KeptProgram, PagedView] | None":
        """Return the program and the cache if the program can compute this pass, else None."""
        rows, seq = batch_and_seq(tokens)
        if not isinstance(cache, PagedView) or rows != len(cache.lengths):
            return None
        kept = self._kept_program() if self._takes([(cache, seq)]) else None
        return None if kept is None else (kept, cache)

    def _takes(self, batches: Sequence[tuple[PagedView, int]]) -> bool:
        """True if the native step can add these numbers of tokens.

        Args:
            batches: cache views, each with the number of new tokens per sequence.
        """
        # Autocast decides the dtype of every operator.
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        for view, seq in batches:
            # A windowed cache takes `slack` + 1 new tokens before it must evict any.
            if seq > view.slack + 1 and any(reach is not None for reach in view.cache.pools):
                return False
            if self.max_positions is not None and view.length + seq > self.max_positions:
                return False
        return 0 < sum(len(view.sequences) * seq for view, seq in batches) <= self.most

    def _kept_program(self) -> "KeptProgram | None":
        """Return the program of the current modules and weights, translated if necessary.

        None if the decoder has hooks, or a computation without an instruction.
        """
        if self.watch.sees_hooks:
            return None
        known = self.translated
        if known is None or not known.holds():
            with _TRANSLATING:  # translation registers hooks; other threads are not affected
                known = self.translated
                if known is not None and known.holds():
                    return known.kept
                self.watch = HookWatch(self.modules())
                if self.watch.sees_hooks:
                    return None
                known = self.translated = Translated(self)
        return known.kept

    def _step_of_batch(
        self, kept: "KeptProgram", view: PagedView, tokens: Tensor, *, last_only: bool
    ) -> Tensor | None:
        """Run `_step` for a batch with the same number of new tokens in each sequence.

        Args:
            kept: the program.
            view: the sequences.
            tokens: (batch, seq), the new tokens.
            last_only: True to return only the logits after each sequence's last token.
        """
        rows, seq = tokens.shape
        view.reserve([seq] * rows)
        counts, index = _shape_of_batch(rows, seq, last_only=last_only)
        logits = self._step(kept, view, tokens.flatten(), counts, index)
        if logits is not None:
            view.lengths = view.lengths + seq
            view.advance(seq)
        return logits

    def _step(
        self,
        kept: "KeptProgram",
        view: PagedView,
        tokens: Tensor,
        counts: Tensor,
        index: Tensor,
    ) -> Tensor | None:
        """Run the native step and return its logits.

        None if a weight is not contiguous any more; the decoder is then translated again later.

        Args:
            kept: the program.
            view: the sequences, with reserved slots for the new tokens.
            tokens: tokens of all sequences, concatenated.
            counts: number of new tokens of each sequence.
            index: indices of the tokens whose next-token logits are computed.
        """
        program, weights = kept
        for store, (heads, *widths) in zip(view.cache.stores, program.layers, strict=True):
            if store.k is None:
                dtype = program.dtype
                store.tensors(*(torch.empty(1, heads, 0, width, dtype=dtype) for width in widths))
        tensors = tensors_of(view)
        # Layers whose attention windows are not shorter than the cache share block tables.
        of_pools = list(dict.fromkeys(store.pool.reach for store in view.cache.stores))
        places = [
            of_pools.index(view.cache.stores[layer].pool.reach) for layer in program.table_users
        ]
        try:
            logits = self.steps.run(
                program.instructions,
                program.numbers,
                program.registers,
                weights,
                angles=self.angles.upto(view.length + int(counts.max()), program.rotations),
                tokens=tokens.long().contiguous(),
                counts=counts,
                lengths=tensors.lengths,
                tables=[tensors.tables[place] for place in places],
                keys=tensors.keys,
                values=tensors.values,
                reaches=program.reaches,
                few=self.few,
                wanted=index,
                vocab=self.config.vocab_size,
            )
        except RuntimeError:
            look_up(self.embedding.tokens, tokens)  # raises a clear error for an id out of range
            if kept.is_cast_in_part:
                raise WorkhorseError(
                    "a part of the decoder was cast to another dtype after a step; cast all of it"
                ) from None
            if kept.is_contiguous:
                raise
            self.translated = None
            return None
        return logits


@functools.lru_cache(256)
def _shape_of_batch(rows: int, seq: int, *, last_only: bool) -> tuple[Tensor, Tensor]:
    """Arguments `counts` and `index` of `_step` for `rows` sequences with `seq` new tokens each."""
    index = torch.arange(rows * seq)
    return torch.full((rows,), seq), index[seq - 1 :: seq].contiguous() if last_only else index


_TRANSLATING = threading.Lock()


class KeptProgram(NamedTuple):
    """A step program, and its weights as registered with the native operator."""

    program: Program
    weights: KeptWeights

    @property
    def is_cast_in_part(self) -> bool:
        """True if a parameter has a new dtype since translation; ALiBi's slopes stay float32."""
        weights = (one for one in self.program.weights if isinstance(one, torch.nn.Parameter))
        return any(one.is_floating_point() and one.dtype != self.program.dtype for one in weights)

    @property
    def is_contiguous(self) -> bool:
        """True if all weights are contiguous, as they were when the program was made."""
        return all(one.is_contiguous() for one in self.program.weights)


class Translated:
    """Result of translating a decoder, valid until its modules or weights are replaced.

    Attributes:
        kept: the program; None if a computation has no instruction.
        why_not: the computation that has no instruction, or empty.
    """

    def __init__(self, decoder: SteppingDecoder) -> None:
        self.held = Members(decoder)
        self.adapted = [(one, one.active) for one in decoder.modules() if isinstance(one, Adapted)]
        self.kept: KeptProgram | None = None
        self.why_not = ""
        try:
            program = translate(decoder)
        except CannotTranslate as error:
            self.why_not = str(error)
        else:
            self.kept = KeptProgram(program, decoder.steps.keep(program.weights))

    def holds(self) -> bool:
        """True if this result is still valid.

        That is if no module or weight was replaced, the first weight not cast, and no other adapter
        set.

        Weights may change in place, because they are read at every step.
        """
        if not self.held.unchanged or any(one.active != name for one, name in self.adapted):
            return False
        return self.kept is None or self.kept.program.weights[0].dtype == self.kept.program.dtype


class SteppingCompiledDecoder(SteppingDecoder, CompiledDecoder):
    """A `SteppingDecoder` that runs compiled steps if there is no native program."""
