"""A backend that computes a whole decoding step in one call of a native operator.

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
from workhorse.execute.backend import Backend, Snapshot, Views, wanted_indices
from workhorse.execute.lower.program import Program, RotationKey
from workhorse.execute.lower.step import translate
from workhorse.execute.native_decoding.layers import DOT_ROWS_BESIDE_GEMM
from workhorse.execute.record import CannotTranslate
from workhorse.native import Operators, Steps
from workhorse.native.steps import KeptWeights
from workhorse.nn import Decoder
from workhorse.nn.cache.fixed import tensors_of
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.embedding import batch_and_seq, look_up
from workhorse.nn.surgery import HookWatch

MAX_TOKENS = 256
"""Maximum number of new tokens of a step, summed over sequences. For more, it is faster to run the
modules, whose attention computes whole blocks of scores."""


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


class NativeStepBackend(Backend):
    """Adds a few tokens to a paged cache in one native call.

    All other passes, such as long prompts, use another backend. So do all passes while the decoder
    has hooks, or if a computation has no instruction. If weights or modules are replaced later, or
    another adapter is set, the decoder is translated again. Other changes to modules are not
    noticed.

    Args:
        fallback: the backend for other passes. Its decoder is on the CPU.
        operators: the native operators, including `steps`.
        exact: True to process any number of tokens in native calls, with the gemms of training, so
            that the bits of a token's logits depend only on the tokens before it, if all
            computations have an instruction (`is_invariant`).
        name: how the steps are computed, for `announcement`.
    """

    def __init__(
        self,
        fallback: Backend,
        operators: Operators,
        *,
        exact: bool = False,
        name: str = "native",
    ) -> None:
        super().__init__(fallback.decoder, operators)
        assert operators.steps is not None
        self.fallback = fallback
        self.exact = exact
        self.name = name
        self.steps = operators.steps
        dtype = next(self.decoder.parameters()).dtype
        self.few = DOT_ROWS_BESIDE_GEMM.get(dtype, 0)
        # Without native gemms, PyTorch computes larger batches faster.
        self.most = self.few if operators.vectors is None else MAX_TOKENS
        if dtype == torch.bfloat16 and operators.matrix_unit is not None:
            self.few, self.most = 1, MAX_TOKENS  # faster from two rows on
        if exact:
            self.few, self.most = 0, sys.maxsize
        self.angles = Angles()
        self.watch = HookWatch(self.decoder.modules())
        self.translated: Translated | None = None

    def logits(self, tokens: Tensor, views: Views, wanted: Sequence[int]) -> Tensor:
        if self._takes(views) and (kept := self._kept_program()):
            logits = self._step(kept, tokens, views, wanted)
            if logits is not None:
                return logits
        return self.fallback.logits(tokens, views, wanted)

    @property
    def announcement(self) -> str:
        """One line for the user.

        This runs the decoder once to check whether one native call can compute a whole step.
        """
        why_not = self.why_not_whole()
        if not why_not:
            return f"decode: {self.name}, whole steps"
        line = self.fallback.announcement
        return line if self.fallback.has_whole_steps else f"{line}; no whole steps: {why_not}"

    @property
    def invariant_batch(self) -> int:
        return super().invariant_batch if self._kept_program() is None else self.few or self.most

    @property
    def is_invariant(self) -> bool:
        return self.exact and self._kept_program() is not None

    def why_not_whole(self) -> str:
        """Name of the computation that the native program cannot express.

        Steps then use the other backend. Empty if a whole step is one native call.
        """
        if self._kept_program() is not None:
            return ""
        if self.watch.sees_hooks or self.translated is None:
            return "hooks"
        return self.translated.why_not

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the program: it refers to the weights of this process."""
        return vars(self) | {"translated": None}

    def _takes(self, views: Views) -> bool:
        """True if the native step can add the new tokens of these sequences."""
        # Autocast decides the dtype of every operator.
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        for view, seq in views:
            # A windowed cache takes `slack` + 1 new tokens before it must evict any.
            if seq > view.slack + 1 and any(reach is not None for reach in view.cache.pools):
                return False
            most = self.decoder.max_positions
            if most is not None and view.length + seq > most:
                return False
        return 0 < sum(len(view.sequences) * seq for view, seq in views) <= self.most

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
                self.watch = HookWatch(self.decoder.modules())
                if self.watch.sees_hooks:
                    return None
                known = self.translated = Translated(self.decoder, self.steps)
        return known.kept

    def _step(
        self, kept: "KeptProgram", tokens: Tensor, views: Views, wanted: Sequence[int]
    ) -> Tensor | None:
        """Compute `logits` with a program.

        None if a weight is not contiguous any more; the decoder is then translated again later.
        """
        batch_and_seq(tokens[None])  # raises a clear error for a wrong dtype
        view, _ = views[0]
        if len(views) > 1:
            view = PagedView(view.cache, [one for part, _ in views for one in part.sequences])
        batches = tuple((len(part.sequences), seq) for part, seq in views)
        added, counts, index = _shape_of_pass(batches, tuple(wanted))
        view.reserve(added)
        program = kept.program
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
                kept.weights or self.steps.keep(program.weights),
                angles=self.angles.upto(view.length + max(added), program.rotations),
                tokens=tokens.long().contiguous(),
                counts=counts,
                lengths=tensors.lengths,
                tables=[tensors.tables[place] for place in places],
                keys=tensors.keys,
                values=tensors.values,
                reaches=program.reaches,
                few=self.few,
                wanted=index,
                vocab=self.decoder.config.vocab_size,
            )
        except RuntimeError:
            # Raises a clear error for an id out of range.
            look_up(self.decoder.embedding.tokens, tokens)
            if kept.is_cast_in_part:
                raise WorkhorseError(
                    "a part of the decoder was cast to another dtype after a step; cast all of it"
                ) from None
            if kept.is_contiguous:
                raise
            self.translated = None
            return None
        for part, seq in views:
            part.lengths = part.lengths + seq
            part.advance(seq)
        return logits


@functools.lru_cache(256)
def _shape_of_pass(
    batches: tuple[tuple[int, int], ...], wanted: tuple[int, ...]
) -> tuple[list[int], Tensor, Tensor]:
    """Number of new tokens of each sequence, also as a tensor, and `wanted_indices`.

    Args:
        batches: the number of sequences of each view, and their numbers of new tokens.
        wanted: see `Backend.logits`.
    """
    added = [seq for rows, seq in batches for _ in range(rows)]
    return added, torch.tensor(added), torch.tensor(wanted_indices(added, wanted))


_TRANSLATING = threading.Lock()


class KeptProgram(NamedTuple):
    """A step program, and its weights as registered with the native operator.

    `weights` is None if PyTorch may swap parameters, which needs that nothing else refers to them.
    Each step then registers the weights again.
    """

    program: Program
    weights: KeptWeights | None

    @property
    def is_cast_in_part(self) -> bool:
        """True if a weight has a new dtype since translation."""
        weights = zip(self.program.weights, self.program.dtypes, strict=True)
        return any(one.dtype != before for one, before in weights)

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

    def __init__(self, decoder: Decoder, steps: Steps) -> None:
        self._snapshot = Snapshot(decoder)
        self.kept: KeptProgram | None = None
        self.why_not = ""
        try:
            program = translate(decoder)
        except CannotTranslate as error:
            self.why_not = str(error)
        else:
            swaps = torch.__future__.get_swap_module_params_on_conversion()
            self.kept = KeptProgram(program, None if swaps else steps.keep(program.weights))

    def holds(self) -> bool:
        """True if this result is still valid.

        That is if no module or weight was replaced, the first weight not cast, and no other adapter
        set.

        Weights may change in place, because they are read at every step.
        """
        if not self._snapshot.unchanged:
            return False
        return self.kept is None or self.kept.program.weights[0].dtype == self.kept.program.dtype
