"""Where the weights that a process has lie in the whole model.

They are of a smaller decoder (`part_of_model`), or of a stage (`keep_stage`).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.nn import Decoder
from workhorse.parallel.config import share_of
from workhorse.parallel.division.teams import Teams
from workhorse.parallel.processes.group import Group

TIED_TABLE = "embedding.tokens.weight"
"""Which the first stage of a pipeline and the last both have where the head is tied to it."""
_OF_ONE_HEAD = re.compile(r"(.+\.[qk]_norm\.heads\.)(\d+)(\..+)")


@dataclass(frozen=True)
class Cut:
    """Where a tensor of a part lies in that of the whole model."""

    name: str
    """In the whole."""
    shape: torch.Size
    """Of the whole."""
    starts: tuple[int, ...]
    """Where the part begins along each axis."""
    sizes: torch.Size
    """Of the part."""
    ways: int
    """In how many different parts the tensor is divided; 1: each process has all of it."""
    again: bool = False
    """Whether an earlier stage has it too: the table of a tied head."""

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor that is whole."""
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(axis, start, size)
        return whole


class Absent(NamedTuple):
    """A tensor that is on other processes alone."""

    shape: torch.Size
    dtype: torch.dtype


class ModelPart:
    """The weights that a process has, and where they lie in the whole model.

    Args:
        whole: the whole decoder, on the meta device.
        states: what an optimizer would keep of it, likewise.
        part: the decoder here, as `part_of_model` says; of its weights names and shapes are read.
        teams: of this process; they have the other parts.

    Attributes:
        cuts: where each parameter lies, by its name here.
        elsewhere: the parameters that are not here at all, by name.
        member: the number of this process among those that divide layers.
        members: how many those are.
        first: the number of the first process of the run that has the same part.
    """

    def __init__(
        self, whole: Decoder, states: Mapping[str, Tensor], part: Decoder, teams: Teams
    ) -> None:
        self.teams, self.first = teams, teams.first
        weights = dict(whole.named_parameters())
        own = {name: weight.shape for name, weight in part.named_parameters()}
        shapes = {name: weight.shape for name, weight in weights.items()}
        team = Group() if teams.layers is None else teams.layers.group
        self.member, self.members = team.rank, team.size
        later = teams.stages is not None and not teams.stages.group.is_first
        cuts = _cuts(shapes, own, whole.config.vocab_size, self.member, self.members)
        self.cuts = {
            name: replace(cut, again=later and name == TIED_TABLE) for name, cut in cuts.items()
        }
        here = {cut.name for cut in self.cuts.values()}
        self.elsewhere = {
            name: Absent(weight.shape, weight.dtype)
            for name, weight in weights.items()
            if name not in here
        }
        self._states_elsewhere = {
            name: Absent(state.shape, state.dtype)
            for name, state in states.items()
            if _owner(name) in self.elsewhere
        }

    def cut(self, name: str, tensor: Tensor) -> Cut:
        """Where a parameter, or what an optimizer keeps of it under a name below its own, lies."""
        if name in self.cuts:
            return self.cuts[name]
        own = self.cuts[_owner(name)]
        named = replace(own, name=f"{own.name}.{name.rpartition('.')[2]}")
        if tensor.ndim:
            return named
        ways = own.ways if own.sizes == own.shape else 1  # else all have one of the same name
        return replace(named, shape=torch.Size(), starts=(), sizes=torch.Size(), ways=ways)

    def beside(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Absent]:
        """What other processes have beside all parameters, or all states."""
        return self.elsewhere if tensors.keys() <= self.cuts.keys() else self._states_elsewhere

    def copies(self, cut: Cut) -> int:
        """How many processes of the team have the same part of a tensor."""
        return self.members // cut.ways

    def added(self, own: Tensor) -> Tensor:
        """The sum over the processes that have the other parts; all must call it."""
        for team in (self.teams.layers, self.teams.stages):
            own = own if team is None else team.group.add(own)
        return own

    def whole_stack(self, parts: Tensor, cut: Cut) -> Tensor:
        """A stack of whole tensors from that of this process's parts, all of one cut."""
        if cut.ways == 1:
            return parts
        assert self.teams.layers is not None
        of_members = self.teams.layers.group.gather(parts)[:: self.copies(cut)]
        return torch.cat(of_members.unbind(), dim=1 + _divided_axis(cut))

    def part_of_stack(self, stack: Tensor, cut: Cut) -> Tensor:
        """This process's part of the result of `whole_stack`."""
        if cut.ways == 1:
            return stack
        axis = _divided_axis(cut)
        return stack.narrow(1 + axis, cut.starts[axis], cut.sizes[axis])


def _owner(state: str) -> str:
    """The parameter of which an optimizer keeps something under that name."""
    return state.rpartition(".")[0]


def _divided_axis(cut: Cut) -> int:
    (axis,) = (n for n, size in enumerate(cut.shape) if size != cut.sizes[n])
    return axis


def _cuts(
    whole: Mapping[str, torch.Size],
    own: Mapping[str, torch.Size],
    vocabulary: int,
    member: int,
    members: int,
) -> dict[str, Cut]:
    """The place of each own parameter: by its head, its tokens, or equal parts of one axis."""
    heads = Counter(found[1] for name in whole if (found := _OF_ONE_HEAD.fullmatch(name)))
    own_heads = Counter(found[1] for name in own if (found := _OF_ONE_HEAD.fullmatch(name)))
    cuts: dict[str, Cut] = {}
    for name, sizes in own.items():
        if found := _OF_ONE_HEAD.fullmatch(name):  # which has a tensor of its own
            before, head, after = found.groups()
            ways = heads[before] // own_heads[before]
            first = member * ways // members * own_heads[before]
            there = f"{before}{first + int(head)}{after}"
            cuts[name] = Cut(there, sizes, (0,) * len(sizes), sizes, ways)
            continue
        shape = whole[name]
        starts, ways = [0] * len(shape), 1
        for axis, (size, of) in enumerate(zip(sizes, shape, strict=True)):
            if size != of and not name.startswith("layers."):
                ways = members
                starts[axis] = share_of(vocabulary, members, member).start
            elif size != of:
                ways = of // size
                starts[axis] = member * ways // members * size
        cuts[name] = Cut(name, shape, tuple(starts), sizes, ways)
    return cuts
