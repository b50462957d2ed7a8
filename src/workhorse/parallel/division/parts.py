"""The part of a model that a rank holds and saves, and checks that a model can be divided.

A part is a smaller decoder (`part_of_model`), a pipeline stage (`keep_stage`), or both.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.files.safetensors import Slice
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.parallel.config import ParallelismConfig, share_of
from workhorse.parallel.division.teams import Teams
from workhorse.parallel.processes.group import Group
from workhorse.parallel.shards import is_sharded

TIED_TABLE = "embedding.tokens.weight"
"""Name of the embedding table. With a tied head, the first and the last pipeline stage have it."""
_OF_ONE_HEAD = re.compile(r"(.+\.[qk]_norm\.heads\.)(\d+)(\..+)")


@dataclass(frozen=True)
class TensorSlice:
    """The slice of one of the model's tensors that is on this rank."""

    name: str
    """Name of the tensor in the whole model."""
    shape: torch.Size
    """Shape of the tensor in the whole model."""
    starts: tuple[int, ...]
    """Start of the slice along each axis of the tensor."""
    sizes: torch.Size
    """Shape of the slice."""
    ways: int
    """Number of different slices that the tensor is cut into; 1: each rank has all of it."""
    again: bool = False
    """True if an earlier pipeline stage has the tensor too: an embedding table tied to the head."""

    def of(self, whole: Tensor) -> Tensor:
        """Cut this slice out of the whole tensor."""
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(axis, start, size)
        return whole


class Absent(NamedTuple):
    """The shape and dtype of a tensor that is not on this rank."""

    shape: torch.Size
    dtype: torch.dtype


class ModelPart:
    """The part of a model that is on a rank: its weights, and their position in the whole model.

    Args:
        whole: the whole decoder, on the meta device.
        states: the optimizer state of the whole decoder, on the meta device.
        part: this rank's decoder, built from `part_of_model`; only names and shapes are read.
        teams: the process groups of this rank.

    Attributes:
        cuts: the slice of each parameter of this rank, by the parameter's name on this rank.
        elsewhere: the parameters that are not on this rank, by name.
        member: this rank's index in the tensor-parallel group.
        members: number of ranks in the tensor-parallel group.
        first: the first rank of the run with the same part of the model.
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

    def cut(self, name: str, tensor: Tensor) -> TensorSlice:
        """Return the slice for a parameter, or for an optimizer state `<parameter>.<state>`.

        Args:
            name: the name on this rank.
            tensor: the parameter or state on this rank.
        """
        if name in self.cuts:
            return self.cuts[name]
        own = self.cuts[_owner(name)]
        named = replace(own, name=f"{own.name}.{name.rpartition('.')[2]}")
        if tensor.ndim:
            return named
        ways = own.ways if own.sizes == own.shape else 1  # scalars of slices share one name
        return replace(named, shape=torch.Size(), starts=(), sizes=torch.Size(), ways=ways)

    def beside(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Absent]:
        """Return the tensors that are not on this rank.

        These are parameters if `tensors` contains parameters, otherwise optimizer states.
        """
        return self.elsewhere if tensors.keys() <= self.cuts.keys() else self._states_elsewhere

    def copies(self, cut: TensorSlice) -> int:
        """Number of ranks of the tensor-parallel group with the same slice of a tensor."""
        return self.members // cut.ways

    def added(self, own: Tensor) -> Tensor:
        """All-reduce: sum a tensor over the ranks that hold different parts of one model.

        All these ranks must call it.
        """
        for team in (self.teams.layers, self.teams.stages):
            own = own if team is None else team.group.add(own)
        return own

    def whole_stack(self, parts: Tensor, cut: TensorSlice) -> Tensor:
        """Gather whole tensors from the slices on the ranks of the tensor-parallel group.

        Args:
            parts: (tensors, …), this rank's slices of several tensors.
            cut: the slice; it is the same for all of these tensors.
        """
        if cut.ways == 1:
            return parts
        assert self.teams.layers is not None
        of_members = self.teams.layers.group.gather(parts)[:: self.copies(cut)]
        return torch.cat(of_members.unbind(), dim=1 + _divided_axis(cut))

    def part_of_stack(self, stack: Tensor, cut: TensorSlice) -> Tensor:
        """Cut this rank's slices out of a stack of whole tensors, as `whole_stack` returns it."""
        if cut.ways == 1:
            return stack
        axis = _divided_axis(cut)
        return stack.narrow(1 + axis, cut.starts[axis], cut.sizes[axis])


def _owner(state: str) -> str:
    """Name of the parameter that an optimizer state belongs to."""
    return state.rpartition(".")[0]


def _divided_axis(cut: TensorSlice) -> int:
    (axis,) = (n for n, size in enumerate(cut.shape) if size != cut.sizes[n])
    return axis


def _cuts(
    whole: Mapping[str, torch.Size],
    own: Mapping[str, torch.Size],
    vocabulary: int,
    member: int,
    members: int,
) -> dict[str, TensorSlice]:
    """Return this rank's slice of each parameter.

    Parameters are divided by heads, by vocabulary ids, or evenly along one axis.

    `whole` and `own` are the shapes in the whole model and on this rank.
    """
    heads = Counter(found[1] for name in whole if (found := _OF_ONE_HEAD.fullmatch(name)))
    own_heads = Counter(found[1] for name in own if (found := _OF_ONE_HEAD.fullmatch(name)))
    cuts: dict[str, TensorSlice] = {}
    for name, sizes in own.items():
        if found := _OF_ONE_HEAD.fullmatch(name):  # each head has a separate tensor
            before, head, after = found.groups()
            ways = heads[before] // own_heads[before]
            first = member * ways // members * own_heads[before]
            there = f"{before}{first + int(head)}{after}"
            cuts[name] = TensorSlice(there, sizes, (0,) * len(sizes), sizes, ways)
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
        cuts[name] = TensorSlice(name, shape, tuple(starts), sizes, ways)
    return cuts


class Kind(NamedTuple):
    """The properties of a parameter that determine which ranks must sum its gradients."""

    of_experts: bool
    """True if the parameter belongs to routed experts that are divided among ranks."""
    ways: int
    """Number of different slices of the parameter; see `TensorSlice.ways`."""
    tied: bool
    """True if the first and the last pipeline stage both have the parameter."""

    def part_of(self, parallel: ParallelismConfig, rank: int) -> Hashable:
        """Return a key that is equal for ranks that sum the gradients of the same part."""
        at = parallel.coordinates(rank)
        stage = 0 if self.tied and at.pipeline == parallel.pipeline - 1 else at.pipeline
        of_layers = at.tensor * self.ways // parallel.tensor
        if self.of_experts:
            return stage, of_layers, parallel.replica(rank) % parallel.expert
        rows = (at.data, at.shard, at.context) if parallel.shard > 1 else ()
        return stage, of_layers, rows


def kinds_of(
    names: Iterable[str], part: ModelPart | None, of_experts: Collection[str], *, tied: bool = False
) -> dict[Kind, list[str]]:
    """Group the names of parameters by the ranks that must sum their gradients.

    `of_experts` has the names of the parameters of routed experts that are divided among ranks. For
    the other arguments see `holders`.
    """
    kinds: dict[Kind, list[str]] = defaultdict(list)
    for name in names:
        ways = 1 if part is None else part.cuts[name].ways
        kinds[Kind(name in of_experts, ways, tied and name == TIED_TABLE)].append(name)
    return kinds


def own_slices(
    tensors: Mapping[str, Tensor], rank: int, part: ModelPart | None
) -> dict[str, Slice]:
    """The slice of each tensor that a rank writes to a checkpoint.

    If several ranks have the same slice, the first writes it, and the others' slices are empty.

    Args:
        tensors: parameters or optimizer states, by name.
        rank: the rank.
        part: the rank's part of the model; None if the rank has all layers undivided.

    Returns:
        The slices, by name in the whole model.
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
    """Return the first row of a rank's shard, and True if no earlier rank has the same shard.

    `first_of_all` is the first rank of the run with the same part of the model.
    """
    assert is_sharded(tensor)
    ranks = tensor.device_mesh.mesh
    copies = ranks.view(-1, ranks.shape[-1])  # the ranks of each copy have all rows together
    number = int((copies == rank).nonzero()[0, 1])
    rows = len(tensor)
    first = min(number * -(-rows // len(copies[0])), rows)
    return first, rank in copies[0] and first_of_all in copies[0]


def check_divisible(config: DecoderConfig, kernel: KernelName, parallel: ParallelismConfig) -> None:
    """Raise an error if a model cannot be divided with these parallelism settings.

    The vocabulary is checked later, by `part_of_model`, when its size is known.

    Raises:
        ConfigError: `context` with non-causal attention or the flex kernel, `expert` without routed
            experts, more pipeline stages than layers, or a size that is not divisible.
    """
    blocks = config.blocks.values()
    if parallel.context > 1:
        context = f"context={parallel.context}"
        if any(not block.attention.causal for block in blocks):
            raise ConfigError(
                f"{context} needs causal attention, but the model has causal=false; remove it",
                "parallel",
            )
        if kernel == "flex":
            raise ConfigError(
                f"{context} is not supported with train.kernel=flex, which is compiled for equal "
                "numbers of keys and queries; remove one of the two",
                "parallel",
            )
    mixes = any(block.mixture for block in blocks)
    if parallel.expert > 1 and not mixes:
        raise ConfigError(
            f"expert={parallel.expert} needs routed experts, but the model has none; remove it",
            "parallel",
        )
    if parallel.pipeline > config.n_layers:
        raise ConfigError(
            f"pipeline={parallel.pipeline} is more than n_layers={config.n_layers}; choose at most "
            f"{config.n_layers}",
            "parallel",
        )
    check_layers(config, parallel.tensor, parallel.expert)


def check_layers(config: DecoderConfig, tensor: int, expert: int = 1) -> None:
    """Raise an error if the layers cannot be divided among `tensor` or `expert` ranks.

    Raises:
        ConfigError: a dimension is not divisible.
    """
    for name, ways, what, whole in _divided(config, tensor, expert):
        if whole % ways:
            raise ConfigError(
                f"{name}={ways} does not divide {what}={whole}; choose a divisor of {whole}",
                "parallel",
            )


def _divided(
    config: DecoderConfig, tensor: int, expert: int
) -> Iterator[tuple[str, int, str, int]]:
    """Yield every dimension that must be divisible.

    Each item is the recipe key, the number of parts, and the name and the size of the dimension.
    """
    for block in config.blocks.values():
        mixture = block.mixture
        yield "tensor", tensor, "n_heads", block.attention.n_heads
        if block.grouped is not None:
            kv_heads = block.grouped.n_kv_heads or block.grouped.n_heads
            if tensor % kv_heads:  # otherwise each head is copied to tensor / kv_heads ranks
                yield "tensor", tensor, "n_kv_heads", kv_heads
        yield "tensor", tensor, "d_ff", block.feed_forward.d_ff
        if mixture is not None:
            yield "expert", expert, "n_experts", mixture.n_experts
            if mixture.shared is not None:
                yield "tensor", tensor, "shared.d_ff", mixture.shared.d_ff
