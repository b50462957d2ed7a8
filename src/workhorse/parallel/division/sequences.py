"""Sequences divided among processes, which give each other keys and values: context parallelism.

Every process of a team has consecutive tokens of the same sequences. To the model, what comes from
the other processes is a cache: attention takes in its own keys and values and gets back all that
its queries may see (2407.21783 §3.3.2). Short convolutions get their inputs likewise.
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


class SequenceTeam:
    """The processes that each have a part of the same sequences, one's tokens after another's.

    Args:
        group: they alone.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def own(self, columns: int) -> slice:
        """Which of a sequence's tokens are this process's."""
        own = share_of(columns, self.group.size, self.group.rank)
        return slice(own.start, own.stop)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of what all processes have; of what all make of it, each has the own gradient."""
        return with_gradient(self.group.add, lambda above: above, x)

    def view(
        self, decoder: Decoder, tokens: Tokens, documents: Tokens | None
    ) -> "DividedSequences":
        """What one forward pass sees of the sequences whose own tokens are these.

        Args:
            decoder: that makes the pass.
            tokens: of this process, as many as of each other.
            documents: of them, as in `Context`.
        """
        return DividedSequences(self, decoder, tokens, documents)


class DividedSequences(CacheView):
    """The other members' tokens, as a model sees them; see `SequenceTeam.view`."""

    def __init__(
        self, team: SequenceTeam, decoder: Decoder, tokens: Tokens, documents: Tokens | None
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
        self.entries = decoder.rooms(self)

    def layer(self, reach: int | None, *, in_blocks: bool = False) -> "DividedEntry":
        """The entry of a layer of that reach; see `Layers`."""
        assert not in_blocks, "only a kernel that generates reads blocks"
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
    """The keys and values of a layer, of which each member computes those of its tokens.

    Args:
        team: who has the others.
        reach: how many of the latest tokens a query sees; None: all.
    """

    def __init__(self, team: SequenceTeam, reach: int | None) -> None:
        self.team = team
        self.reach = reach

    def update(self, k: NewKeys, v: NewValues) -> tuple[Keys, Values]:
        """All that the own tokens may attend to."""
        group, reach = self.team.group, self.reach
        own = torch.cat((k, v), dim=-1)
        seen = with_gradient(
            partial(_seen, group, reach), partial(_sent_back, group, reach, k.shape[2]), own
        )
        k, v = seen.split([k.shape[-1], v.shape[-1]], dim=-1)
        return k, v


def _seen(group: Group, reach: int | None, own: Tensor) -> Tensor:
    """The features of the members' tokens up to the last own one, as far back as a query sees."""
    seq = own.shape[2]
    first = _first(group.rank * seq, reach)
    seen = group.gather(own)[first // seq : group.rank + 1]
    return torch.cat(seen.unbind(), dim=2)[:, :, first % seq :]


def _sent_back(group: Group, reach: int | None, seq: int, gradient: Tensor) -> Tensor:
    """The gradient of the own features, of which each member sends its share."""
    first = [_first(member * seq, reach) // seq for member in range(group.size)]
    padded = F.pad(gradient, (0, 0, -gradient.shape[2] % seq, 0))
    parts = padded.unflatten(2, (-1, seq)).movedim(2, 0)  # one for each member that is seen
    sends = [int(first[group.rank] <= other <= group.rank) for other in range(group.size)]
    receives = [int(first[other] <= group.rank <= other) for other in range(group.size)]
    return summed(group.exchange(parts, sends, receives))


def _first(start: int, reach: int | None) -> int:
    """The first token that the one at `start` may see."""
    return 0 if reach is None else max(0, start - reach + 1)
