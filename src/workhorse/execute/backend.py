"""Backends: what generation asks of a decoder, and the backend that calls the decoder's modules."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from workhorse.native import Operators
from workhorse.nn import Decoder
from workhorse.nn.cache.paged_view import PackedView, PagedView
from workhorse.nn.surgery import Members
from workhorse.transforms.adapters import adapted_layers

Views = Sequence[tuple[PagedView, int]]
"""The sequences of a pass: views of one cache, each with the number of new tokens per sequence."""


class Backend(ABC):
    """A way to compute the logits of a decoder over sequences of a paged cache.

    A backend holds the decoder. A faster one also holds the backend for passes that it cannot
    compute.

    Args:
        decoder: the decoder, in evaluation mode. Users call and hook its modules.
        operators: the native operators that the decoder uses. They include `training` only if
            `scores` uses it.
    """

    has_whole_steps = False
    """True if all modules of a decoding step are always computed together."""

    def __init__(self, decoder: Decoder, operators: Operators) -> None:
        self.decoder = decoder
        self.operators = operators

    @abstractmethod
    def logits(self, tokens: Tensor, views: Views, wanted: Sequence[int]) -> Tensor:
        """Add tokens to the cache in one pass, and return logits of the next tokens.

        Args:
            tokens: int64 (tokens,), the new tokens of all sequences, in the order of the views.
            views: the sequences. They need not have reserved cache blocks.
            wanted: for each sequence, the number of its newest tokens whose next-token logits are
                returned. At least one is not 0.

        Returns:
            Logits, `(sum(wanted), vocab)`.
        """

    @property
    @abstractmethod
    def announcement(self) -> str:
        """One line for the user: how the decoder runs, and which modules run in PyTorch and why."""

    @property
    def invariant_batch(self) -> int:
        """Largest batch size in which a decode step computes each row bitwise as if it were alone.

        For modules it is 1, because the order of PyTorch's additions depends on the shape of the
        batch.
        """
        return 1

    @property
    def is_invariant(self) -> bool:
        """True if the bits of logits depend only on the tokens before them in their sequence.

        They then depend neither on the other sequences of a pass nor on how a sequence is divided
        into passes, if no pass of a paged cache with a window adds more than `slack` + 1 tokens to
        a sequence. For modules it is False, for the same reason as `invariant_batch` is 1.
        """
        return False

    def scores(self, logits: Tensor, tokens: Tensor) -> Tensor | None:
        """Compute log-probabilities with the bits of training.

        Args:
            logits: (rows, vocab).
            tokens: int64 (rows,).

        Returns:
            The log-probabilities (rows,), without gradients. None if the backend has no operator
            for them, so that PyTorch computes them in float32.
        """
        training = self.operators.training
        if training is None:
            return None
        rows = logits.contiguous()
        return training.score_(rows, tokens, None, multiplier=1.0, entropy=False)[:, 0]


class ModuleBackend(Backend):
    """Calls the modules of a decoder: those of `nn`, or native layers.

    Args:
        decoder: see `Backend`.
        operators: see `Backend`; None: no native operators.
        name: how the modules are computed, for `announcement`.
    """

    def __init__(
        self, decoder: Decoder, operators: Operators | None = None, name: str = "reference"
    ) -> None:
        super().__init__(decoder, operators or Operators())
        self.name = name

    def logits(self, tokens: Tensor, views: Views, wanted: Sequence[int]) -> Tensor:
        view, seq = views[0]
        shape = len(view.sequences), seq
        if len(views) == 1 and set(wanted) == {1}:
            return self.decoder.next_logits(tokens.view(shape), cache=view)
        if len(views) == 1 and set(wanted) == {seq}:
            return self.decoder(tokens.view(shape), cache=view).flatten(0, 1)
        x = self.decoder.hidden(tokens[None], cache=PackedView(views))
        added = [seq for view, seq in views for _ in view.sequences]
        index = torch.tensor(wanted_indices(added, wanted), device=x.device)
        return self.decoder.unembed(x[:, index])[0]

    @property
    def announcement(self) -> str:
        return f"decode: {self.name}"


def backend_of(decoder: Decoder | Backend) -> Backend:
    """Return a backend; a decoder gets one that calls its modules."""
    return decoder if isinstance(decoder, Backend) else ModuleBackend(decoder)


def wanted_indices(added: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return the indices of the tokens of a pass whose next-token logits are returned.

    Args:
        added: number of new tokens of each sequence.
        wanted: see `Backend.logits`.
    """
    both = zip(accumulate(added), wanted, strict=True)
    return [n for end, count in both for n in range(end - count, end)]


class Snapshot:
    """The modules, weights and active adapters of a decoder at one time, to detect changes.

    Weights may change in place.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._members = Members(decoder)
        self._adapters = [(one, one.active) for one in adapted_layers(decoder).values()]

    @property
    def unchanged(self) -> bool:
        """True if no module or weight was replaced, and the same adapters are active."""
        return self._members.unchanged and all(one.active == name for one, name in self._adapters)
