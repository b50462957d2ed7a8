"""Context parallelism: sequences divided among ranks, which exchange keys and values.

Each rank of a group has a consecutive chunk of the same sequences. The model accesses the other
ranks' tokens through the interface of a KV cache. Attention passes the keys and values of the
rank's tokens, and gets all keys and values that its queries may see (2407.21783 §3.3.2). Short
convolutions get the inputs of earlier tokens in the same way.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.nn import Decoder
from workhorse.nn.attention.masks import Placement
from workhorse.nn.cache.view import CacheEntry, CacheView
from workhorse.nn.context import lengths_of_documents, number_runs
from workhorse.nn.shapes import Keys, Lengths, NewKeys, NewValues, Positions, Slots, Tokens, Values
from workhorse.parallel.config import share_of
from workhorse.parallel.processes.group import Group, summed, with_gradient


class ContextParallelGroup:
    """The context-parallel group: ranks with consecutive chunks of the same sequences.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def own(self, columns: int) -> slice:
        """Return the slice of a sequence of `columns` tokens that is on this rank."""
        own = share_of(columns, self.group.size, self.group.rank)
        return slice(own.start, own.stop)

    def summed(self, x: Tensor) -> Tensor:
        """All-reduce: sum x over the ranks. The gradient is passed through unchanged."""
        return with_gradient(self.group.add, lambda above: above, x)

    def view(
        self, decoder: Decoder, tokens: Tokens, documents: Tokens | None
    ) -> "DividedSequences":
        """Return the cache view for one forward pass over sequences divided among the ranks.

        Args:
            decoder: the decoder to run.
            tokens: this rank's tokens; every rank has the same number of tokens.
            documents: document ids of this rank's tokens, as in `Context`.
        """
        return DividedSequences(self, decoder, tokens, documents)


class DividedSequences(CacheView):
    """A cache view of the tokens of all ranks; see `ContextParallelGroup.view`."""

    def __init__(
        self, team: ContextParallelGroup, decoder: Decoder, tokens: Tokens, documents: Tokens | None
    ) -> None:
        rows, seq = tokens.shape
        self.team = team
        columns = seq * team.group.size
        self.own = team.own(columns)
        self.length = columns - seq
        self.lengths = torch.full((rows,), columns, device=tokens.device)
        self.uniform = documents is None
        self.slack = 0
        self.positions = torch.arange(columns, device=tokens.device)[None]
        self.documents: Tokens | None = None
        if documents is not None:
            runs = number_runs(torch.cat(team.group.gather(documents).unbind(), dim=1))
            self.positions = self.positions - runs.starts
            self.documents = runs.numbers
        self.entries = decoder.cache_stores(self)

    def layer(self, reach: int | None, *, in_blocks: bool = False) -> "DividedEntry":
        """Return the cache entry of a layer.

        Args:
            reach: number of latest tokens that a query of the layer sees; None: all.
            in_blocks: must be False; only caches for generation have blocks.
        """
        assert not in_blocks, "only generation kernels read blocks"
        return DividedEntry(self.team, reach)

    def next_positions(self, seq: int) -> Positions:
        del seq
        return self.positions[:, self.own]

    def text_lengths(self) -> Lengths:
        if self.documents is None:
            return super().text_lengths()
        return lengths_of_documents(self.positions, self.documents)[:, self.own]

    def slots_before(self, reach: int) -> tuple[Slots, Slots]:
        back = torch.arange(1, reach, device=self.positions.device)
        columns = torch.arange(self.own.start, self.own.stop, device=back.device)
        slots = columns[:, None] - back - _first(self.own.start, reach)
        exists = self.next_positions(0)[..., None] >= back
        return slots.clamp(min=0).expand(len(self.lengths), -1, -1), exists

    def begin(self, positions: Positions, *, uniform: bool) -> None:
        del positions, uniform

    def place(self, reach: int | None) -> Placement:
        keys = slice(_first(self.own.start, reach), self.own.stop)
        documents = self.documents
        return Placement(
            self.positions[:, self.own],
            self.positions[:, keys],
            documents=None if documents is None else documents[:, self.own],
            key_documents=None if documents is None else documents[:, keys],
            aligned=self.uniform and self.own.start == 0,
        )


class DividedEntry(CacheEntry):
    """The keys and values of a layer; each rank computes them for its own tokens.

    Args:
        team: the context-parallel group.
        reach: number of latest tokens that a query sees; None: all.
    """

    def __init__(self, team: ContextParallelGroup, reach: int | None) -> None:
        self.team = team
        self.reach = reach

    def update(self, k: NewKeys, v: NewValues) -> tuple[Keys, Values]:
        """Exchange keys and values with the other ranks.

        Args:
            k: keys of this rank's tokens.
            v: values of this rank's tokens.

        Returns:
            The keys and values that this rank's queries may see, including its own.
        """
        group, reach = self.team.group, self.reach
        own = torch.cat((k, v), dim=-1)
        seen = with_gradient(
            partial(_seen, group, reach), partial(_sent_back, group, reach, k.shape[2]), own
        )
        k, v = seen.split([k.shape[-1], v.shape[-1]], dim=-1)
        return k, v


def _seen(group: Group, reach: int | None, own: Tensor) -> Tensor:
    """Gather the keys and values of all tokens that this rank's queries may see.

    Args:
        group: the context-parallel group.
        reach: number of latest tokens that a query sees; None: all.
        own: keys and values of this rank's tokens, concatenated along the last axis.
    """
    seq = own.shape[2]
    first = _first(group.rank * seq, reach)
    seen = group.gather(own)[first // seq : group.rank + 1]
    return torch.cat(seen.unbind(), dim=2)[:, :, first % seq :]


def _sent_back(group: Group, reach: int | None, seq: int, gradient: Tensor) -> Tensor:
    """Backward pass of `_seen`: send gradients to the ranks whose keys and values they belong to.

    Returns:
        The gradient of this rank's keys and values, summed over all ranks that saw them.
    """
    first = [_first(member * seq, reach) // seq for member in range(group.size)]
    padded = F.pad(gradient, (0, 0, -gradient.shape[2] % seq, 0))
    parts = padded.unflatten(2, (-1, seq)).movedim(2, 0)  # one for each rank that is seen
    sends = [int(first[group.rank] <= other <= group.rank) for other in range(group.size)]
    receives = [int(first[other] <= group.rank <= other) for other in range(group.size)]
    return summed(group.exchange(parts, sends, receives))


def _first(start: int, reach: int | None) -> int:
    """Index of the first token that token `start` sees: the first of the latest `reach` tokens."""
    return 0 if reach is None else max(0, start - reach + 1)
