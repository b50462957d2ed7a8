"""The part of a model that each rank holds and writes, and whether a model can be divided.

They are of a smaller decoder (`part_of_model`), or of a stage (`keep_stage`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.files.safetensors import Slice
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.optim.shards import is_sharded
from workhorse.parallel.config import ParallelismConfig, share_of
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


def own_slices(
    tensors: Mapping[str, Tensor], rank: int, part: ModelPart | None
) -> dict[str, Slice]:
    """The part of each tensor that a process has to write, so that all together write all.

    What several processes have, the first of them writes; the others' slices are empty.

    Args:
        tensors: by name, parameters or what an optimizer keeps of them.
        rank: of the process.
        part: of the model that it has; None: all layers are whole.

    Returns:
        By their names in the whole model.
    """
    slices: dict[str, Slice] = {}
    if part is not None:
        for name, (shape, dtype) in part.beside(tensors).items():
            slices[name] = Slice(torch.empty(0, dtype=dtype), (0,) * len(shape), tuple(shape))
    for name, tensor in tensors.items():
        whole, shape = name, tensor.shape
        starts = (0,) * tensor.ndim
        first_of_all, writes = 0, True
        if part is not None:
            cut = part.cut(name, tensor)
            whole, shape, starts = cut.name, cut.shape, cut.starts
            first_of_all = part.first
            writes = part.member % part.copies(cut) == 0 and not cut.again
        values = tensor.detach()
        if is_sharded(values):
            first, has_first = _place(values, rank, first_of_all)
            starts = (starts[0] + first, *starts[1:])
            writes &= has_first
            values = values.to_local()
        else:
            writes &= rank == first_of_all
        slices[whole] = Slice(values if writes else values.reshape(-1)[:0], starts, tuple(shape))
    return slices


def _place(tensor: Tensor, rank: int, first_of_all: int) -> tuple[int, bool]:
    """The first row that a process has of a sharded tensor, and whether it is the first with it.

    Args:
        tensor: sharded by rows.
        rank: of the process.
        first_of_all: the number of the first process with the same part of the model.
    """
    assert is_sharded(tensor)
    ranks = tensor.device_mesh.mesh
    copies = ranks.view(-1, ranks.shape[-1])  # each has all rows
    number = int((copies == rank).nonzero()[0, 1])
    rows = len(tensor)
    first = min(number * -(-rows // len(copies[0])), rows)
    return first, rank in copies[0] and first_of_all in copies[0]


def check_divisible(config: DecoderConfig, kernel: KernelName, parallel: ParallelismConfig) -> None:
    """Refuse a mesh that this model cannot be divided by.

    Raises:
        ConfigError: sequences whose attention looks ahead or whose kernel is compiled for one
            length; experts that there are not; more stages than layers; or a number that is not
            divisible. Whether there are tokens enough is seen when they are known: `part_of_model`.
    """
    blocks = config.blocks.values()
    if parallel.context > 1:
        context = f"context={parallel.context}"
        if any(not block.attention.causal for block in blocks):
            raise ConfigError(
                f"{context} divides sequences, of which causal=false sees the end; leave it out",
                "parallel",
            )
        if kernel == "flex":
            raise ConfigError(
                f"{context} does not go with train.kernel=flex, which is compiled for as many "
                "keys as queries; leave one of the two out",
                "parallel",
            )
    mixes = any(block.mixture for block in blocks)
    if parallel.expert > 1 and not mixes:
        raise ConfigError(
            f"expert={parallel.expert} divides routed experts, and this model has none; leave it "
            "out",
            "parallel",
        )
    if parallel.pipeline > config.n_layers:
        raise ConfigError(
            f"pipeline={parallel.pipeline} is more than n_layers={config.n_layers}; choose at most "
            "that",
            "parallel",
        )
    check_layers(config, parallel.tensor, parallel.expert)


def check_layers(config: DecoderConfig, tensor: int, expert: int = 1) -> None:
    """Refuse to divide layers of which some part cannot be.

    Raises:
        ConfigError: a number is not divisible.
    """
    for name, ways, what, whole in _divided(config, tensor, expert):
        if whole % ways:
            raise ConfigError(
                f"{name}={ways} does not divide {what}={whole}; choose a divisor", "parallel"
            )


def _divided(
    config: DecoderConfig, tensor: int, expert: int
) -> Iterator[tuple[str, int, str, int]]:
    """Into how many parts what is divided, each with its name."""
    for block in config.blocks.values():
        mixture = block.mixture
        yield "tensor", tensor, "n_heads", block.attention.n_heads
        if block.grouped is not None:
            kv_heads = block.grouped.n_kv_heads or block.grouped.n_heads
            if tensor % kv_heads:  # else each head is copied to as many processes
                yield "tensor", tensor, "n_kv_heads", kv_heads
        yield "tensor", tensor, "d_ff", block.feed_forward.d_ff
        if mixture is not None:
            yield "expert", expert, "n_experts", mixture.n_experts
            if mixture.shared is not None:
                yield "tensor", tensor, "shared.d_ff", mixture.shared.d_ff
